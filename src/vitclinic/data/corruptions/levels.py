"""The 256 levels of a pixel, as floats in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

_SLACK = 1e-4
"""Levels that a value may lie below a whole one and still count as it: rounding errors of float32 are far smaller."""


def truncated(x: Tensor) -> Tensor:
    """Clipped to [0, 1] and brought down to the next level: what a conversion to 8 bits does in the published code."""
    return torch.add(torch.full((), _SLACK, device=x.device), x, alpha=255).clamp_(0, 255).floor_().div_(255)


def rounded(x: Tensor) -> Tensor:
    """Clipped to [0, 1] and brought to the nearest level."""
    return (x * 255).clamp_(0, 255).round_().div_(255)


def luma(x_bchw: Tensor) -> Tensor:
    """Grey from RGB by the weights of Rec. 601, [B, 1, H, W]; grey images as they are."""
    if x_bchw.shape[1] == 1:
        return x_bchw
    return (x_bchw[:, :1] * 0.299).add_(x_bchw[:, 1:2], alpha=0.587).add_(x_bchw[:, 2:], alpha=0.114)
