"""Mixup and CutMix, drawn per sample, and CutMix on the cells of a grid, which also gives targets for patches.

Each image has a partner (see `stream`: its neighbour in the training stream) and its own lambda ~ Beta(a, a)
and method, so that its mixed image does not depend on the batch it happens to be in.

    mixup:  x = lambda x_i + (1 - lambda) x_j
    CutMix: a box of area 1 - lambda of x_i shows x_j; lambda becomes the share of x_i that is left
    y = lambda y_i + (1 - lambda) y_j

Shapes: B images, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.errors import RecipeError
from vitclinic.data.decoding import Size
from vitclinic.data.randomness import Keys, uniforms


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Convert labels [B] to class probabilities [B, K], with `smoothing` spread evenly over all classes."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


class Mixing:
    """Mixup with Beta(mixup, mixup) and CutMix with Beta(cutmix, cutmix); if both are on, each half the time."""

    def __init__(self, mixup: float, cutmix: float, probability: float = 1.0) -> None:
        self.mixup, self.cutmix, self.probability = mixup, cutmix, probability

    def __call__(self, x_bchw: Tensor, y_bk: Tensor, partner: NDArray[np.int64], keys: Keys) -> tuple[Tensor, Tensor]:
        """Mix the first len(partner) images, each with the row that `partner` gives."""
        count = len(partner)
        keep, cut = self.lambdas(keys[:count])
        mixed = x_bchw[:count].clone()
        blended = np.flatnonzero(~cut & (keep < 1))
        if blended.size:
            weight = torch.from_numpy(keep[blended]).float()[:, None, None, None]
            mixed[blended] = torch.lerp(x_bchw[partner[blended]], x_bchw[blended], weight)
        boxes = cut_boxes(keep, keys[:count], x_bchw.shape[2], x_bchw.shape[3])
        for row in np.flatnonzero(cut & (keep < 1)):
            top, bottom, left, right = boxes[row]
            mixed[row, :, top:bottom, left:right] = x_bchw[partner[row], :, top:bottom, left:right]
            keep[row] = 1 - (bottom - top) * (right - left) / (x_bchw.shape[2] * x_bchw.shape[3])
        share = torch.from_numpy(keep).float()[:, None]
        return mixed, share * y_bk[:count] + (1 - share) * y_bk[partner]

    def lambdas(self, keys: Keys) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return each image's lambda (1 if it is not mixed), and True for those that are cut rather than blended."""
        from scipy.special import betaincinv

        draws = uniforms(keys, "mixing", 3)
        cut = draws[:, 0] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        alpha = np.where(cut, self.cutmix, self.mixup)
        keep = betaincinv(alpha, alpha, draws[:, 1])
        return np.where(draws[:, 2] < self.probability, keep, 1.0), cut


def cut_boxes(keep: NDArray[np.float64], keys: Keys, height: int, width: int) -> NDArray[np.int64]:
    """Return (top, bottom, left, right) of boxes with the image's aspect and area 1 - keep, clipped at the borders."""
    side = np.sqrt(1 - keep)
    centre = uniforms(keys, "cut box", 2) * [height, width]
    half = np.stack([side * height, side * width], axis=1) / 2
    low, high = np.rint(centre - half), np.rint(centre + half)
    rows = np.clip(np.stack([low[:, 0], high[:, 0]], axis=1), 0, height)
    columns = np.clip(np.stack([low[:, 1], high[:, 1]], axis=1), 0, width)
    return np.concatenate([rows, columns], axis=1).astype(np.int64)


def mix_cells(x_bchw: Tensor, y_bk: Tensor, partner_b: Tensor, cut_bgg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, targets [B, K] and patch targets [B, N, K] where the cells in `cut_bgg` show the partner.

    The first B = len(partner_b) images are mixed; `partner_b` says which row of all of them each is mixed with.
    """
    count, (rows, columns) = len(partner_b), cut_bgg.shape[1:]
    x_bcghgw = x_bchw.reshape(*x_bchw.shape[:2], rows, x_bchw.shape[2] // rows, columns, -1)
    mixed = torch.where(cut_bgg[:, None, :, None, :, None], x_bcghgw[partner_b], x_bcghgw[:count])
    cut_bn1 = cut_bgg.flatten(1)[:, :, None]
    patch_targets = torch.where(cut_bn1, y_bk[partner_b, None], y_bk[:count, None])
    share = 1 - cut_bn1.to(y_bk.dtype).mean(dim=1)
    targets = share * y_bk[:count] + (1 - share) * y_bk[partner_b]
    return mixed.reshape(count, *x_bchw.shape[1:]), targets, patch_targets


class PatchMixing:
    """CutMix with Beta(cutmix, cutmix) whose boxes are aligned to cells of `cell` pixels."""

    def __init__(self, cutmix: float, probability: float, cell: int | Sequence[int], size: Size) -> None:
        height, width = (cell, cell) if isinstance(cell, int) else cell
        if size[0] % height or size[1] % width:
            raise RecipeError(
                f"'data.augment.cutmix_cell': images of {size[0]} x {size[1]} pixels cannot be divided into cells of"
                f" {height} x {width}."
            )
        self.grid = size[0] // height, size[1] // width
        self._draws = Mixing(0.0, cutmix, probability)

    def __call__(
        self, x_bchw: Tensor, y_bk: Tensor, partner: NDArray[np.int64], keys: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, targets [B, K] and patch targets [B, N, K] of the first B = len(partner) images.

        `partner` gives the row that each is mixed with.
        """
        cut_bgg = torch.from_numpy(self._masks(keys[: len(partner)])).to(x_bchw.device)
        return mix_cells(x_bchw, y_bk, torch.from_numpy(partner).to(x_bchw.device), cut_bgg)

    def _masks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which cells show the partner, [B, g, g']; a box is rounded to cells as CutMix's is to pixels."""
        keep, _ = self._draws.lambdas(keys)
        top, bottom, left, right = cut_boxes(keep, keys, *self.grid).T[:, :, None]
        row, column = np.arange(self.grid[0]), np.arange(self.grid[1])
        inside = ((row >= top) & (row < bottom))[:, :, None] & ((column >= left) & (column < right))[:, None, :]
        masks: NDArray[np.bool_] = inside
        return masks
