"""Random numbers that belong to a sample, not to a process, and the order of the samples.

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


class SampleOrder:
    """Order of the images in the training stream.

    With `repeats` r, an epoch shows n / r of the images r times each (repeated augmentation). Copies are two
    places apart, so that neighbours, which are mixed with each other, are different images.
    """

    def __init__(self, count: int, seed: int, repeats: int = 1) -> None:
        self.count, self.seed, self.repeats = count, seed, repeats
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __call__(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the image at each place, and the count of its showing (epoch and copy as one integer)."""
        epochs, offsets = places // self.count, places % self.count
        images, showings = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            order, copies = self._epoch(int(epoch))
            images[rows] = order[offsets[rows]]
            showings[rows] = epoch * self.repeats + copies[offsets[rows]]
        return images, showings

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if epoch not in self._epochs:
            self._epochs = {e: drawn for e, drawn in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = self._draw_epoch(epoch)
        return self._epochs[epoch]

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = self._permute(epoch)
        if self.repeats == 1:
            return order, np.zeros(self.count, np.int64)
        place = np.arange(self.count)
        pair, within = place // (2 * self.repeats), place % (2 * self.repeats)
        return order[np.minimum(2 * pair + within % 2, self.count - 1)], within // 2

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return generator("order", self.seed, epoch).permutation(self.count)


class IdentityOrder(SampleOrder):
    """Order of a stream in which every K places in a row, from a multiple of K on, show one identity.

    An epoch shuffles the images of every identity, cuts them into groups of K, and shuffles the groups. An identity
    with too few images for its last group shows some of them again, in another showing, so that every sample has
    random numbers of its own. A place depends on seed and epoch alone, as in any stream.

    Args:
        labels: The identity of each image.
        seed: Seed of the order.
        instances: Images K of an identity.

    Example:
        >>> order = IdentityOrder(np.array([0, 0, 0, 1, 1]), seed=0, instances=2)
        >>> images, showings = order(np.arange(6))
        >>> [len(set(np.array([0, 0, 0, 1, 1])[images[place : place + 2]])) for place in (0, 2, 4)]
        [1, 1, 1]
    """

    def __init__(self, labels: NDArray[np.int64], seed: int, instances: int) -> None:
        self.instances = instances
        self.images = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        groups = sum(-(-len(images) // instances) for images in self.images)
        copies = max(-(-instances // len(images)) for images in self.images)
        super().__init__(groups * instances, seed, repeats=1 + copies)

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        random = generator("identities", self.seed, epoch)
        images, copies = [], []
        for own in self.images:
            shuffled = random.permutation(own)
            count = -(-len(own) // self.instances) * self.instances
            images.append(np.resize(shuffled, count).reshape(-1, self.instances))
            copies.append((np.arange(count) // len(own)).reshape(-1, self.instances))
        groups = random.permutation(sum(len(part) for part in images))
        order, copy = np.concatenate(images)[groups], np.concatenate(copies)[groups]
        return order.reshape(-1), copy.reshape(-1).astype(np.int64)
