"""PK sampling: batches of P identities with K images each, for losses that compare images of a batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.randomness import SampleOrder, generator


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
