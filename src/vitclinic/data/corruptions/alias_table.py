"""Tables to draw Poisson numbers from, one random word a number [Walker 1977: the alias method].

A distribution over K values is cut into K cells of equal weight, each shared by two values at most: its own up to a
threshold, and from there on another, its alias. A uniform word chooses the cell by its upper bits and the value by the
others. A pixel has 256 levels, so that shot noise needs no more than 256 distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AliasTable:
    """Distributions over the values 0 to 2^cell_bits - 1, those of distribution d from place d 2^cell_bits on."""

    threshold: Tensor
    alias: Tensor
    cell_bits: int

    def look_up(self, which: Tensor, bits: Tensor) -> Tensor:
        """A value of distribution `which` for every random word, all int32."""
        rest = 32 - self.cell_bits
        cell = (bits >> rest).bitwise_and_((1 << self.cell_bits) - 1)
        place = (which << self.cell_bits).add_(cell).flatten()
        threshold, alias = (table.index_select(0, place).reshape(bits.shape) for table in (self.threshold, self.alias))
        return torch.where((bits & ((1 << rest) - 1)) < threshold, cell, alias)


@lru_cache(maxsize=16)
def poisson_table(rates: tuple[float, ...], device: torch.device) -> AliasTable:
    """One distribution for each rate; what is cut off at the end is far less than a word can choose."""
    from scipy.special import gammaln, xlogy

    most = max(rates)
    cell_bits = math.ceil(math.log2(most + 8 * math.sqrt(most) + 16))
    k, rate = np.arange(1 << cell_bits), np.array(rates)[:, None]
    shares = np.exp(xlogy(k, rate) - rate - gammaln(k + 1.0))
    threshold, alias = _cells(shares / shares.sum(1, keepdims=True))
    scaled = np.rint(threshold * 2.0 ** (32 - cell_bits)).astype(np.int32)
    return AliasTable(
        torch.from_numpy(scaled.ravel()).to(device), torch.from_numpy(alias.ravel()).to(device), cell_bits
    )


def _cells(shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Thresholds in [0, 1] and aliases, [distributions, K]: the poorest value's cell is filled up by the richest."""
    count = shares.shape[1]
    rows, rest = np.arange(len(shares)), shares * count
    threshold, alias = np.ones_like(rest), np.tile(np.arange(count, dtype=np.int32), (len(rest), 1))
    for _ in range(count - 1):
        poor, rich = rest.argmin(1), rest.argmax(1)
        has = np.minimum(rest[rows, poor], 1.0)
        threshold[rows, poor], alias[rows, poor] = has, rich
        rest[rows, rich] -= 1 - has
        rest[rows, poor] = 1.0  # full: neither poor nor rich from here on
    return threshold, alias
