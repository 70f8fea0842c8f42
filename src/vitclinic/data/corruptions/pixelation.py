"""Pixelation: made smaller and back by a box filter, as Pillow does it, for a batch at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.parameters import Setting


def pixelate(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Made smaller to a `share` of each side and back, in 8 bits at every step; to enlarge by a box repeats pixels."""
    share = setting.parameters
    h, w = x_bchw.shape[-2:]
    high, wide = int(h * share), int(w * share)
    small = _box_rows(_turned(x_bchw * 255), wide)  # rows are added and copied faster than columns
    small = _turned(_box_rows(_turned(small), high).div_(255))
    rows, columns = (_nearest(a, b).to(x_bchw.device) for a, b in ((high, h), (wide, w)))
    return _turned(small.index_select(2, columns)).index_select(2, rows)


def _turned(x_bchw: Tensor) -> Tensor:
    return x_bchw.transpose(2, 3).contiguous()


def _box_rows(x_bchw: Tensor, smaller: int) -> Tensor:
    """So many rows, each the rounded mean of those in its window."""
    taps, shares = box_windows(x_bchw.shape[2], smaller)
    total = torch.zeros_like(x_bchw[:, :, :smaller])
    for rows, share in zip(taps.to(x_bchw.device), shares.to(x_bchw.device), strict=True):
        total.addcmul_(x_bchw.index_select(2, rows), share)
    return total.add_(0.5 + 1e-3).floor_()


@lru_cache(maxsize=64)
def box_windows(size: int, smaller: int) -> tuple[Tensor, Tensor]:
    """Of each new pixel the pixels whose centres lie in it, the left end excluded, [most, smaller]; and their shares.

    Shares are [most, smaller, 1]; where a window has fewer than the most, they are 0.
    """
    ratio = size / smaller
    centres = (np.arange(smaller)[:, None] + 0.5) * ratio
    distance = (np.arange(size) - centres + 0.5) * (1.0 / ratio)  # rounded as Pillow does, for pixels on a border
    first, end = (np.floor(centres + way * 0.5 * ratio + 0.5) for way in (-1, 1))
    window = (np.arange(size) >= first) & (np.arange(size) < end)
    inside = window & (distance > -0.5) & (distance <= 0.5)
    counts = inside.sum(1)
    steps = np.arange(counts.max())[:, None]
    taps = np.minimum(inside.argmax(1) + steps, size - 1)
    shares = (steps < counts) / counts
    return torch.from_numpy(taps), torch.from_numpy(shares.astype(np.float32))[..., None]


@lru_cache(maxsize=64)
def _nearest(size: int, larger: int) -> Tensor:
    """Of each of `larger` pixels the one of `size` that its middle lies in."""
    return torch.from_numpy(((np.arange(larger) + 0.5) * (size / larger)).astype(np.int64))
