"""Random numbers that belong to a sample, not to a process.

All randomness of a sample derives from (seed, epoch, sample index), so that a run draws the same numbers with any
number of workers, any batch size and any number of processes, and resumes without saving generator states.
`sample_keys` turns the triple into one 64-bit key per sample; `uniforms` draws from keys. Both are vectorized: the
finalizer of splitmix64, used as a counter-based generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _scramble(x: Keys) -> Keys:
    """Apply splitmix64's finalizer: a bijection of 64-bit words in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _absorb(state: Keys, word: Any) -> Keys:
    """Mix one more word (or one word per sample) into `state`."""
    with np.errstate(over="ignore"):
        return _scramble(state * _GOLDEN + _scramble(np.asarray(word).astype(np.uint64) + _GOLDEN))


def sample_keys(seed: int, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> Keys:
    """Return one key for each (seed, epoch, sample index)."""
    state = np.full(len(indices), np.uint64(seed % 2**64))
    return _absorb(_absorb(state, epochs), indices)


def view_keys(keys: Keys, view: int) -> Keys:
    """Return the keys of a further view of each sample; view 0 has the sample's own."""
    return keys if view == 0 else _absorb(keys, view)


def uniforms(keys: Keys, purpose: str, count: int) -> NDArray[np.float64]:
    """Draw `count` uniform numbers in [0, 1) for each key, [len(keys), count]; different purposes are independent."""
    return (words(keys, purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def words(keys: Keys, purpose: str, count: int) -> NDArray[np.uint64]:
    """Draw the 64-bit words that `uniforms` is made from."""
    stream = np.uint64(int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little"))
    state = _absorb(keys, stream)
    return _absorb(state[:, None], np.arange(1, count + 1, dtype=np.uint64)[None, :])


def generator(*names: int | str) -> np.random.Generator:
    """Return a numpy generator for a whole sequence (a permutation, a subset), seeded by `names`."""
    return np.random.Generator(np.random.Philox(key=_digest_words(names)))


def torch_seed(*names: int | str) -> int:
    """Return a 63-bit seed for torch's generator, derived from `names`."""
    return int(_digest_words(names)[0] >> np.uint64(1))


def _digest_words(names: Sequence[int | str]) -> NDArray[np.uint64]:
    text = "/".join(str(name) for name in names)
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype=np.uint64)
