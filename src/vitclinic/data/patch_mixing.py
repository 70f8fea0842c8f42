"""CutMix on patch borders: every patch comes from one image and has one label [gong2021 Sec. 4].

An image is a grid of cells, the network's patches; the box covers whole cells, so that a network can be asked for
the class of each of them. One mask of cells makes all of it: the image, the patches' targets, and the image's
own target, whose lambda is the share of the cells that are left of it.

Shapes: B images, C channels, K classes; g x g' cells of c x c' pixels; N = g g' cells in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.decoding import Size
from vitclinic.data.mixing import Mixing, cut_boxes
from vitclinic.data.randomness import Keys
from vitclinic.errors import RecipeError


class PatchMixing:
    """CutMix with Beta(cutmix, cutmix) whose boxes lie on the borders of cells of `cell` pixels."""

    def __init__(self, cutmix: float, probability: float, cell: int | Sequence[int], size: Size) -> None:
        height, width = (cell, cell) if isinstance(cell, int) else cell
        if size[0] % height or size[1] % width:
            raise RecipeError(
                f"'data.augment.cutmix_cell': images of {size[0]} x {size[1]} pixels do not divide into cells of"
                f" {height} x {width}."
            )
        self.grid = size[0] // height, size[1] // width
        self._draws = Mixing(0.0, cutmix, probability)

    def __call__(
        self, x_bchw: Tensor, y_bk: Tensor, partner: NDArray[np.int64], keys: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images, targets [B, K] and patch targets [B, N, K] of the first B = len(partner) images.

        `partner` says which row each is mixed with.
        """
        count, (rows, columns) = len(partner), self.grid
        theirs = torch.from_numpy(partner).to(x_bchw.device)
        cut_bgg = torch.from_numpy(self._masks(keys[:count])).to(x_bchw.device)
        x_bcghgw = x_bchw.reshape(*x_bchw.shape[:2], rows, x_bchw.shape[2] // rows, columns, -1)
        mixed = torch.where(cut_bgg[:, None, :, None, :, None], x_bcghgw[theirs], x_bcghgw[:count])
        cut_bn1 = cut_bgg.flatten(1)[:, :, None]
        patch_targets = torch.where(cut_bn1, y_bk[theirs, None], y_bk[:count, None])
        share = 1 - cut_bn1.to(y_bk.dtype).mean(dim=1)
        targets = share * y_bk[:count] + (1 - share) * y_bk[theirs]
        return mixed.reshape(count, *x_bchw.shape[1:]), targets, patch_targets

    def _masks(self, keys: Keys) -> NDArray[np.bool_]:
        """[B, g, g']: which cells show the partner. A box is rounded to cells as CutMix's is to pixels."""
        keep, _ = self._draws.lambdas(keys)
        top, bottom, left, right = cut_boxes(keep, keys, *self.grid).T[:, :, None]
        row, column = np.arange(self.grid[0]), np.arange(self.grid[1])
        inside = ((row >= top) & (row < bottom))[:, :, None] & ((column >= left) & (column < right))[:, None, :]
        masks: NDArray[np.bool_] = inside
        return masks
