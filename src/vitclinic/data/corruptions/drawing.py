"""Random numbers that belong to an image: the same whatever the batch, the order, the process or the device.

Every image has a key from (seed, corruption, severity, image index), and every array that is drawn for it two 32-bit
words from that key. Number n of the array is a hash of n and those words (a counter-based generator), so that whole
batches are drawn at once, where they are needed: in all threads of the CPU, or on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.corruptions.alias_table import poisson_table
from vitclinic.data.randomness import sample_keys, words


class Draws:
    """What is random about a batch of images. Each call draws anew, for all images."""

    def __init__(
        self, purpose: str, seed: int, indices: Sequence[int] | NDArray[np.int64], device: torch.device | str = "cpu"
    ) -> None:
        rows = np.asarray(indices, dtype=np.int64)
        self.keys = sample_keys(seed, np.zeros_like(rows), rows)
        self.purpose = purpose
        self.device = torch.device(device)
        self._calls = 0

    def __len__(self) -> int:
        return len(self.keys)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, [B, *shape]: the inverse of the normal distribution at uniform numbers, at most 5.4."""
        unit = self._bits(*shape).float().mul_(2.0**-31).clamp_(2.0**-24 - 1, 1 - 2.0**-24)
        return unit.erfinv_().mul_(math.sqrt(2))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), [B, *shape]."""
        return self._uniform(*shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high` - 1, [B, *shape], as int64."""
        return self._uniform(*shape).mul_(high - low).floor_().add_(low).long()

    def poisson(self, rates: tuple[float, ...], which: Tensor) -> Tensor:
        """Poisson numbers; that of a place has the rate `rates`[`which`], `which` being int32 [B, ...]."""
        return poisson_table(rates, self.device).look_up(which, self._bits(*which.shape[1:])).float()

    def _uniform(self, *shape: int) -> Tensor:
        return self._bits(*shape).bitwise_and_(-256).float().mul_(2.0**-32).add_(0.5)

    def _bits(self, *shape: int) -> Tensor:
        """Random 32-bit words, as int32 [B, *shape], the upper bits being the better ones.

        n times the golden ratio (a Weyl sequence), mixed by Wellons' lowbias32 but for its last step, which is for the
        lower bits. One key is where an image starts; without the other, which comes in between, two images that
        start close to each other would share a part of one sequence.
        """
        keys = torch.from_numpy(words(self.keys, f"{self.purpose} {self._calls}", 1).view(np.int32)).to(self.device)
        self._calls += 1
        x = _weyl(math.prod(shape), self.device) + keys[:, :1]
        spare = torch.empty_like(x)
        _fold(x, 16, spare).mul_(0x7FEB352D).add_(keys[:, 1:])
        _fold(x, 15, spare).mul_(0x846CA68B - 2**32)
        return x.reshape(len(self), *shape)


@lru_cache(maxsize=16)
def _weyl(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device).mul_(0x9E3779B9 - 2**32)


def _fold(x: Tensor, by: int, spare: Tensor) -> Tensor:
    """x ^= x >> by, the shift filling in zeros; in place."""
    torch.bitwise_right_shift(x, by, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - by)) - 1))
