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
    windows running fastest. A shifted window at the end of an axis holds tokens from both ends of the grid, which a
    mask keeps apart.
    """

    size: Size
    shift: Size = (0, 0)
    pad_first: bool = False

    def positions(self, grid: Size) -> Tensor:
        """(row, column) of every token of every window, [windows, tokens, 2]; (-1, -1) is padding."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        places_hw2 = torch.stack((rows, columns), dim=-1)
        margin = self._padding(grid)

        def pad(x_hw2: Tensor) -> Tensor:
            return F.pad(x_hw2, (0, 0, 0, margin[1], 0, margin[0]), value=-1)

        def roll(x_hw2: Tensor) -> Tensor:
            return x_hw2.roll((-self.shift[0], -self.shift[1]), dims=(0, 1))

        return self._cut(roll(pad(places_hw2)) if self.pad_first else pad(roll(places_hw2)))

    def regions(self, grid: Size) -> Tensor:
        """The side of the seam on which every token of every window is, [windows, tokens]: the same number in a window
        where tokens may see each other.

        The seam lies `shift` before the end of the padded axis, whatever is padding there (in timm, which rolls first,
        it is then not where the ends of the grid meet).
        """
        rows, columns = (
            (torch.arange(length + pad) >= length + pad - shift).int()
            for length, pad, shift in zip(grid, self._padding(grid), self.shift, strict=True)
        )
        return self._cut((2 * rows[:, None] + columns)[..., None]).squeeze(-1)

    def _padding(self, grid: Size) -> list[int]:
        return [-length % window for length, window in zip(grid, self.size, strict=True)]

    def _cut(self, x_hwc: Tensor) -> Tensor:
        """What lies on the padded grid, by windows: [windows, tokens, C]."""
        height, width = self.size
        windows = x_hwc.reshape(len(x_hwc) // height, height, -1, width, x_hwc.shape[-1])
        return windows.transpose(1, 2).reshape(-1, height * width, x_hwc.shape[-1])
