"""Windows of a windowed attention: which place on the grid each token of a map stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitclinic.anatomy.sites import Size


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of `size`, on a grid rolled back by `shift` and padded to a multiple of `size`.

    Libraries differ in what comes first: `pad_first` pads and then rolls (torchvision, Hugging Face),
    otherwise the grid is rolled and then padded (timm). A map's batch axis is then B * number of windows,
    windows running fastest.
    """

    size: Size
    shift: Size = (0, 0)
    pad_first: bool = False

    def positions(self, grid: Size) -> Tensor:
        """(row, column) of every token of every window, [windows, tokens, 2]; (-1, -1) is padding."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        places_hw2 = torch.stack((rows, columns), dim=-1)
        pad = [-length % window for length, window in zip(grid, self.size, strict=True)]

        def padded(x_hw2: Tensor) -> Tensor:
            return F.pad(x_hw2, (0, 0, 0, pad[1], 0, pad[0]), value=-1)

        def rolled(x_hw2: Tensor) -> Tensor:
            return x_hw2.roll((-self.shift[0], -self.shift[1]), dims=(0, 1))

        places_hw2 = rolled(padded(places_hw2)) if self.pad_first else padded(rolled(places_hw2))
        rows_of_windows = (grid[0] + pad[0]) // self.size[0]
        windows = places_hw2.reshape(rows_of_windows, self.size[0], -1, self.size[1], 2)
        return windows.transpose(1, 2).reshape(-1, self.size[0] * self.size[1], 2)
