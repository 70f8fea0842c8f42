"""Random numbers that belong to an image: the same whatever the batch, the order, the process or the device.

Every image has a key from (seed, corruption, severity, image index), and every array that is drawn for it a generator
of its own, started from that key. Numbers are drawn on the CPU, in threads, into one tensor a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.random import PCG64DXSM, Generator
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.randomness import sample_keys, words

Fill = Callable[[Generator, int], None]
"""Draws the numbers of one image: its generator, and its row."""


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
        """Standard normal, [B, *shape]."""
        values = np.empty((len(self), *shape), np.float32)
        return self._drawn(values, lambda random, row: random.standard_normal(out=values[row], dtype=np.float32))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), [B, *shape]."""
        values = np.empty((len(self), *shape), np.float32)
        return self._drawn(values, lambda random, row: random.random(out=values[row], dtype=np.float32))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high` - 1, [B, *shape], as int64."""
        values = np.empty((len(self), *shape), np.int64)

        def fill(random: Generator, row: int) -> None:
            values[row] = random.integers(low, high, shape, dtype=np.int16)

        return self._drawn(values, fill)

    def poisson(self, rates: Tensor) -> Tensor:
        """Poisson numbers with those rates, [B, ...]."""
        wanted = rates.cpu().numpy()
        values = np.empty(rates.shape, np.float32)

        def fill(random: Generator, row: int) -> None:
            values[row] = random.poisson(wanted[row])

        return self._drawn(values, fill)

    def _drawn(self, values: NDArray[Any], fill: Fill) -> Tensor:
        states = words(self.keys, f"{self.purpose} {self._calls}", 4).tolist()
        self._calls += 1

        def some(rows: range) -> None:
            source = PCG64DXSM(0)
            random = Generator(source)
            for row in rows:  # a new generator would cost ten times what setting its state does
                a, b, c, d = states[row]
                state: Any = {"state": a << 64 | b, "inc": c << 64 | d | 1}
                source.state = {"bit_generator": "PCG64DXSM", "state": state, "has_uint32": 0, "uinteger": 0}
                fill(random, row)

        in_threads(some, len(self))
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def in_threads(work: Callable[[range], None], count: int) -> None:
    """`work` on the numbers 0 to `count` - 1, in ranges, one for each of torch's threads."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        work(range(count))
        return
    borders = [count * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, range(*pair)) for pair in pairwise(borders)]:
            done.result()
