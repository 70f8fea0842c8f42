"""Windows of windowed attention: the place on the grid of each token of a map."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitclinic.anatomy.sites import Size


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows on a grid that is rolled back by `shift` and padded to a multiple of `size`.

    A map's batch axis is B * number of windows, windows running fastest. A shifted window at the end of an axis holds
    tokens from both ends of the grid, which a mask keeps apart.

    Args:
        size: (height, width) of a window.
        shift: How far the grid is rolled back, (rows, columns).
        pad_first: Pad and then roll (torchvision, Hugging Face); otherwise roll and then pad (timm).

    Example:
        >>> Windows(size=(1, 2)).positions((1, 4)).tolist()
        [[[0, 0], [0, 1]], [[0, 2], [0, 3]]]
    """

    size: Size
    shift: Size = (0, 0)
    pad_first: bool = False

    def positions(self, grid: Size) -> Tensor:
        """Return (row, column) of every token of every window, [windows, tokens, 2]; (-1, -1) is padding."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        places_hw2 = torch.stack((rows, columns), dim=-1)
        margin = self._padding(grid)

        def pad(x_hw2: Tensor) -> Tensor:
            return F.pad(x_hw2, (0, 0, 0, margin[1], 0, margin[0]), value=-1)

        def roll(x_hw2: Tensor) -> Tensor:
            return x_hw2.roll((-self.shift[0], -self.shift[1]), dims=(0, 1))

        return self._cut(roll(pad(places_hw2)) if self.pad_first else pad(roll(places_hw2)))

    def regions(self, grid: Size) -> Tensor:
        """Return the side of the seam of every token of every window, [windows, tokens].

        Tokens of a window may attend to each other if their numbers are equal. The seam lies `shift` before the end of
        the padded axis, even if that is padding (in timm, which rolls first, this is then not where the grid wraps).
        """
        rows, columns = (
            (torch.arange(length + pad) >= length + pad - shift).int()
            for length, pad, shift in zip(grid, self._padding(grid), self.shift, strict=True)
        )
        return self._cut((2 * rows[:, None] + columns)[..., None]).squeeze(-1)

    def _padding(self, grid: Size) -> list[int]:
        return [-length % window for length, window in zip(grid, self.size, strict=True)]

    def _cut(self, x_hwc: Tensor) -> Tensor:
        """Cut the padded grid into windows, [windows, tokens, C]."""
        height, width = self.size
        windows = x_hwc.reshape(len(x_hwc) // height, height, -1, width, x_hwc.shape[-1])
        return windows.transpose(1, 2).reshape(-1, height * width, x_hwc.shape[-1])
