"""Mini-batch CKA: the unbiased HSIC of Gram matrices, summed over mini-batches, and its ratio [Nguyen et al. 2021].

Shapes: L layers (or units), n images of a mini-batch, G groups of mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 4
"""Minimum size of a mini-batch: the unbiased HSIC of fewer images divides by zero."""
GROUPS = 20
"""Maximum number of groups of mini-batches for intervals, so that memory does not grow with the images."""

Matrix = NDArray[np.float64]


def mini_batch_cka(batches: Iterable[Sequence[Tensor]]) -> Matrix:
    """Return mini-batch linear CKA between all pairs of layers, [L, L] [Nguyen et al. 2021].

    Args:
        batches: Mini-batches, each a list with the features [n, ...] of each layer for n images. Those of fewer than
            four images are skipped.

    Raises:
        ValueError: If no mini-batch has four images.

    Example:
        >>> features = torch.randn(8, 5)
        >>> mini_batch_cka([[features, 3 * features + 1]]).round(3)
        array([[1., 1.],
               [1., 1.]])
    """
    sums: HSICSums | None = None
    for layers in batches:
        if len(layers[0]) >= LEAST:
            sums = sums or HSICSums(len(layers))
            sums.add(torch.stack([gram(features).double().cpu() for features in layers]))
    if sums is None:
        raise ValueError(f"no mini-batch has at least {LEAST} images")
    return sums.cka()


def gram(features: Tensor) -> Tensor:
    """Return the linear kernel [n, n] of `features` [n, ...] minus their mean, in float32 (float64 for such features).

    Subtracting the mean does not change the unbiased HSIC, but keeps small differences beside a large mean in float32.
    Features that differ by no more than the rounding of the mean are constant and give zero.
    """
    features = features.flatten(1)
    dtype = torch.promote_types(features.dtype, torch.float32)
    mean = features.mean(0, dtype=dtype)
    deviations = features - mean
    products = deviations @ deviations.T
    rounding = (8 * torch.finfo(dtype).eps) ** 2 * mean.square().sum()
    return products * (products.diagonal().amax() > rounding)


def u_center(grams: Matrix) -> Matrix:
    """Return U-centered Gram matrices [L, n, n]: the inner product of two is n (n - 3) times their unbiased HSIC.

    With K of zero diagonal, K_ij - (K1)_i / (n-2) - (K1)_j / (n-2) + 1'K1 / ((n-1)(n-2)) off the diagonal, and zero on
    it [Szekely and Rizzo 2014]. The HSIC of a layer with itself is then a sum of squares, and never negative.
    """
    n = grams.shape[-1]
    if n < LEAST:
        raise ValueError(f"the unbiased HSIC needs at least {LEAST} images (got {n})")
    diagonal = np.arange(n)
    centred = grams.copy()
    centred[:, diagonal, diagonal] = 0
    rows = centred.sum(-1) / (n - 2)
    centred -= rows[:, :, None] + rows[:, None, :] - rows.sum(-1)[:, None, None] / (n - 1)
    centred[:, diagonal, diagonal] = 0
    return centred


def hsic(grams: Matrix) -> Matrix:
    """Return the unbiased HSIC [L, L] of all pairs of Gram matrices [L, n, n], by one matrix product.

    HSIC_1(K, L) = [tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2/(n-2) 1'KL1] / (n (n-3)), for K and L with zero diagonals.
    """
    n = grams.shape[-1]
    flat = u_center(grams).reshape(len(grams), -1)
    values: Matrix = flat @ flat.T / (n * (n - 3))
    return values


class HSICSums:
    """Sums of HSIC [L, L] over mini-batches, weighted by their number of images; sums of two processes can be added.

    The weights keep a smaller last mini-batch from counting for more than its share; for mini-batches of one size, the
    result is their plain mean.
    """

    def __init__(self, layers: int) -> None:
        self.hsic = np.zeros((GROUPS, layers, layers))
        self.images = np.zeros(GROUPS, dtype=np.int64)
        self.batches = 0

    def add(self, grams: Tensor) -> None:
        """Add a mini-batch, given by its Gram matrices [L, n, n]."""
        n = grams.shape[-1]
        group = self.batches % GROUPS
        self.hsic[group] += n * hsic(grams.double().cpu().numpy())
        self.images[group] += n
        self.batches += 1

    def merge(self, other: HSICSums) -> None:
        """Add the mini-batches of another process, as if they came after these."""
        self.hsic += np.roll(other.hsic, self.batches, axis=0)
        self.images += np.roll(other.images, self.batches)
        self.batches += other.batches

    def cka(self) -> Matrix:
        """Return HSIC(i, j) / sqrt(HSIC(i, i) HSIC(j, j)), [L, L]."""
        return ratio(self.hsic.sum(0))

    def without_each(self) -> Matrix:
        """Return CKA without each group of mini-batches in turn, [G, L, L]; empty for a single mini-batch."""
        used = self.hsic[self.images > 0]
        if len(used) < 2:
            return np.empty((0, *self.hsic.shape[1:]))
        return np.stack([ratio(np.delete(used, group, axis=0).sum(0)) for group in range(len(used))])


def ratio(summed: Matrix) -> Matrix:
    """Return CKA from summed HSIC, [L, L]; 0 for a layer that is the same for all images, whose HSIC is 0.

    Negative values are kept: they are unbiased estimates of a similarity near 0, and clipping would bias them.
    """
    scale = np.sqrt(summed.diagonal())
    scale = np.where(scale == 0, np.inf, scale)
    cka: Matrix = np.clip(summed / (scale[:, None] * scale[None, :]), -1, 1)
    return cka
