"""Mini-batch CKA: the unbiased HSIC of Gram matrices, summed over mini-batches, and its ratio (Nguyen et al. 2021).

Shapes: L layers (or units), n images of a mini-batch, G groups of mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 4
"""Images of a mini-batch: the unbiased HSIC of fewer divides by zero."""
GROUPS = 20
"""The most groups that mini-batches are kept apart in, for intervals: memory does not grow with their number."""

Matrix = NDArray[np.float64]


def mini_batch_cka(batches: Iterable[Sequence[Tensor]]) -> Matrix:
    """Linear CKA of all pairs of layers, [L, L]: a mini-batch is the features [n, ...] of each layer for n images.

    A mini-batch of fewer than four images is left out.

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
        raise ValueError(f"there is no mini-batch of at least {LEAST} images")
    return sums.cka()


def gram(features: Tensor) -> Tensor:
    """The linear kernel [n, n] of `features` [n, ...] less their mean, in float32 or, of such features, float64.

    The unbiased HSIC does not change when features are translated, but float32 would lose what differs between images
    beside a large mean. Features that differ by no more than the rounding of that mean give zero: they are constant.
    """
    features = features.flatten(1)
    dtype = torch.promote_types(features.dtype, torch.float32)
    mean = features.mean(0, dtype=dtype)
    deviations = features - mean
    products = deviations @ deviations.T
    rounding = (8 * torch.finfo(dtype).eps) ** 2 * mean.square().sum()
    return products * (products.diagonal().amax() > rounding)


def u_center(grams: Matrix) -> Matrix:
    """Gram matrices [L, n, n] such that the inner product of two of them is n (n - 3) times their unbiased HSIC.

    With K of zero diagonal, K_ij - (K1)_i / (n-2) - (K1)_j / (n-2) + 1'K1 / ((n-1)(n-2)) off the diagonal, and zero on
    it (Szekely and Rizzo 2014). A self-HSIC is then a sum of squares and never negative, whatever rounding does.
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
    """The unbiased HSIC [L, L] of all pairs of Gram matrices [L, n, n]: one matrix product.

    HSIC_1(K, L) = [tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2/(n-2) 1'KL1] / (n (n-3)), diagonals being zero.
    """
    n = grams.shape[-1]
    flat = u_center(grams).reshape(len(grams), -1)
    values: Matrix = flat @ flat.T / (n * (n - 3))
    return values


class HSICSums:
    """Sums over mini-batches of their HSIC [L, L] times their images: of two processes they can be added.

    A mini-batch counts as often as it has images, so that a smaller last one does not weigh more than its share; of
    mini-batches of one size this is the mean over mini-batches.
    """

    def __init__(self, layers: int) -> None:
        self.hsic = np.zeros((GROUPS, layers, layers))
        self.images = np.zeros(GROUPS, dtype=np.int64)
        self.batches = 0

    def add(self, grams: Tensor) -> None:
        """Take in a mini-batch by its Gram matrices, [L, n, n]."""
        n = grams.shape[-1]
        group = self.batches % GROUPS
        self.hsic[group] += n * hsic(grams.double().cpu().numpy())
        self.images[group] += n
        self.batches += 1

    def merge(self, other: HSICSums) -> None:
        """Take in the mini-batches of another one, as if they had come after these."""
        self.hsic += np.roll(other.hsic, self.batches, axis=0)
        self.images += np.roll(other.images, self.batches)
        self.batches += other.batches

    def cka(self) -> Matrix:
        """HSIC(i, j) / sqrt(HSIC(i, i) HSIC(j, j)), [L, L]."""
        return ratio(self.hsic.sum(0))

    def without_each(self) -> Matrix:
        """The same without each group of mini-batches in turn, [G, L, L]; empty if there is one mini-batch."""
        used = self.hsic[self.images > 0]
        if len(used) < 2:
            return np.empty((0, *self.hsic.shape[1:]))
        return np.stack([ratio(np.delete(used, group, axis=0).sum(0)) for group in range(len(used))])


def ratio(summed: Matrix) -> Matrix:
    """CKA from summed HSIC, [L, L]: 0 for a layer that is the same for all images, whose HSIC is 0.

    Below 0 it is an unbiased estimate of about nothing in common, and stays: cut off, it would be biased.
    """
    scale = np.sqrt(summed.diagonal())
    scale = np.where(scale == 0, np.inf, scale)
    cka: Matrix = np.clip(summed / (scale[:, None] * scale[None, :]), -1, 1)
    return cka
