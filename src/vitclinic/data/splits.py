"""Splits and subsets: which images are for training, validation and test.

Everything rests on one idea: a *stratified order*, a seeded permutation of the images every prefix of which
has the classes in their proportions. A held-out share is a prefix of it, and so is a subset: subsets are
reproducible and nested.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.randomness import generator

Indices = NDArray[np.int64]

HELD_OUT = 0.1
"""The share of the training images that a missing val or test split takes, unless `data.held_out` says otherwise."""


def stratify(labels: NDArray[np.int64], seed: int) -> Indices:
    """Return a permutation every prefix of which is stratified.

    The i-th of a class's n shuffled images gets the rank (i + 1/2) / n, and the images are sorted by rank
    (ties in random order). A class too small to be in a prefix is left out of it rather than over-represented.
    """
    random = generator("stratified", seed)
    tie_break = random.permutation(len(labels))
    by_class = np.lexsort((tie_break, labels))
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    ranks = (place + 0.5) / counts[labels]
    return np.lexsort((random.permutation(len(labels)), ranks)).astype(np.int64)


def assign(
    labels: Mapping[str, NDArray[np.int64]], seed: int, share: float = HELD_OUT
) -> dict[str, tuple[str, Indices]]:
    """Return, for each of train, val and test, the source split it is drawn from and the indices in it.

    Splits that the source has are kept as they are; val and test that it lacks are held out of its training
    images, a `share` of them each. A source without training images (a test set) lacks the others, too.
    """
    if "train" not in labels:
        first, nothing = next(iter(labels)), np.empty(0, dtype=np.int64)
        return {
            split: (split, np.arange(len(labels[split]), dtype=np.int64)) if split in labels else (first, nothing)
            for split in ("val", "test", "train")
        }
    held = round(share * len(labels["train"]))
    kept = held == 0 or {"val", "test"} <= labels.keys()
    order = np.arange(len(labels["train"]), dtype=np.int64) if kept else stratify(labels["train"], seed)
    result: dict[str, tuple[str, Indices]] = {}
    for split in ("val", "test"):
        if split in labels:
            result[split] = (split, np.arange(len(labels[split]), dtype=np.int64))
        else:
            result[split] = ("train", np.sort(order[:held]))
            order = order[held:]
    result["train"] = ("train", np.sort(order))
    return result


def training_count(images: int, splits: Collection[str], share: float = HELD_OUT) -> int:
    """Return how many of `images` training images `assign` leaves for training, if the source has these splits."""
    return images - round(share * images) * len({"val", "test"}.difference(splits))


def subset(labels: NDArray[np.int64], count: int, seed: int) -> Indices:
    """Return the first `count` images of the stratified order, as sorted positions in `labels`."""
    return np.sort(stratify(labels, seed)[:count])
