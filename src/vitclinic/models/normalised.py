"""A network that takes pixels in [0, 1]: its normalisation is part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalised(nn.Module):
    """`backbone((x - mean) / std)`.

    Attacks, corruptions and measurements then all work on pixels, and no mean or standard deviation can be
    forgotten or applied twice.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, x_bchw: Tensor) -> Tensor:
        logits: Tensor = self.backbone((x_bchw - self.mean) / self.std)
        return logits
