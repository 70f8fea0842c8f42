"""Data sources of any kind: classes, labelled images, and their splits into training, validation and test.

Splits and subsets rest on one idea: a *stratified order*, a seeded permutation of the images every prefix of which
has the classes in their proportions. A held-out share is a prefix of it, and so is a subset: subsets are
reproducible and nested.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data.decoding import Size
from vitclinic.data.randomness import generator

SPLITS = ("train", "val", "test")


ROLES = ("query", "gallery")
"""Parts of the test split of data for retrieval."""


class Records(Protocol):
    """Protocol of the labelled images of one split, not yet decoded. Picklable, so that workers can read it."""

    labels: NDArray[np.int64]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return a name for image `index` in messages: its file, or its table and row."""

    def read(self, index: int) -> Image.Image:
        """Open image `index`; may raise any of `decoding.UNREADABLE`."""

    def contents(self) -> Sequence[Any]:
        """Return one item per image that identifies it without decoding it, independent of its location."""


class NumberedRecords:
    """Base of records that are identified by their number alone: rows of a table, entries of an array."""

    def __init__(self, source: str, labels: ArrayLike) -> None:
        self.source = source
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.source} image {index}"

    def contents(self) -> list[int]:
        return list(range(len(self)))


@runtime_checkable
class ComputedRecords(Records, Protocol):
    """Protocol of records that are in no file: all of them at a time are faster than one by one."""

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all images in order, [height, width] or [height, width, 3]."""


_IN_WORDS = {"class": "class labels", "mask": "masks", "objects": "objects", "questions": "questions"}


@dataclass(frozen=True)
class Source:
    """Classes and splits of a source: at least one split, called `train` if it has no name of its own."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Records]
    fingerprint: str
    """Changes whenever the source changes; cheap to compute, so it may use local paths and modification times."""
    uniform: tuple[Size, int] | None = None
    """Size and channels of all images, where the source knows them beforehand."""
    notes: tuple[str, ...] = ()
    """What was left out, one sentence each."""
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What images come with beside a class (`mask`, `objects`, `questions`), with the classes of each: those of pixels,
    of objects, or the answers. Records then have a method of that name (`annotations.annotation`)."""
    queries: NDArray[np.bool_] | None = None
    """True for the test images that are queries, False for those in the gallery; None if they are not told apart."""

    def __post_init__(self) -> None:
        for split, records in self.splits.items():
            if self.classes or not self.targets:
                _check_labels(records, len(self.classes), split)
        if "train" in self.splits and not len(self.splits["train"]):
            raise DataError(f"'{self.name}' has no training images.")

    def classes_of(self, target: str) -> tuple[str, ...]:
        """Return the classes of what `data.target` names.

        Raises:
            DataError: The images do not come with it.
        """
        classes = self.classes if target == "class" else self.targets.get(target, ())
        if not classes:
            found = " and ".join(_IN_WORDS[kind] for kind in [*(["class"] if self.classes else []), *self.targets])
            raise DataError(
                f"The images of '{self.name}' come with {found}, not with {_IN_WORDS[target]}: choose another task, or"
                " other data."
            )
        return classes

    def read_column(self, name: str, key: str) -> dict[str, NDArray[np.int64]]:
        """Return a column of all splits, as a number for each value.

        Args:
            name: The column.
            key: The key of the section `data` that names it, for errors.

        Raises:
            DataError: There is no such column.
        """
        found = {}
        for split, records in self.splits.items():
            columns: Mapping[str, NDArray[np.int64]] = getattr(records, "columns", {})
            if name not in columns:
                known = ", ".join(columns) or "none: only parquet has columns"
                raise DataError(f"'data.{key}': '{self.name}' has no column '{name}' ({known}).")
            found[split] = columns[name]
        return found

    @property
    def main(self) -> Records:
        """Training images, or the first split of a set that has none."""
        return self.splits.get("train") or next(iter(self.splits.values()))


def _check_labels(records: Records, classes: int, split: str) -> None:
    wrong = np.flatnonzero((records.labels < 0) | (records.labels >= classes))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"{records.name(first)}: label {records.labels[first]} is out of range for {classes} classes"
            f" ({wrong.size} such labels in the {split} split)."
        )


LEAVE_OUT = "or leave it out by data.on_error=skip in a recipe"
"""The end of a sentence about something that cannot be read; only recipes have this option."""


def describe_unreadable(records: Records, index: int, error: Exception) -> str:
    """Return the message that says which image cannot be read, and why."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{records.name(index)}: not a readable image ({reason})."


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
    images, a `share` of them each. If nothing is held out, the test images of a source that has val and no test are
    those of val, as ImageNet is scored. A source without training images (a test set) lacks the others, too.
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
        origin = "val" if split not in labels and held == 0 and "val" in labels else split
        if origin in labels:
            result[split] = (origin, np.arange(len(labels[origin]), dtype=np.int64))
        else:
            result[split] = ("train", np.sort(order[:held]))
            order = order[held:]
    result["train"] = ("train", np.sort(order))
    return result


def assign_values(
    labels: Mapping[str, NDArray[np.int64]], values: NDArray[np.int64], seed: int, share: float = HELD_OUT
) -> dict[str, tuple[str, Indices]]:
    """Return the same as `assign`, with whole values of a column held out: no two splits share one.

    Values are taken in a random order, val and test in turn, until each has at least its share of the images.

    Args:
        labels: Labels of each split of the source.
        values: The column's value for each training image.
        seed: Seed of the order.
        share: Share of the training images that a missing val or test split takes.

    Raises:
        DataError: Too few values are left for training.
    """
    missing = [split for split in ("val", "test") if split not in labels]
    result = {
        split: (split, np.arange(len(found), dtype=np.int64)) for split, found in labels.items() if split != "train"
    }
    known, counts = np.unique(values, return_counts=True)
    sizes = dict(zip(known.tolist(), counts.tolist(), strict=True))
    order = generator("values", seed).permutation(known).tolist()
    for split in missing:
        taken: list[int] = []
        while share and sum(sizes[value] for value in taken) < share * len(values):
            if len(order) < 2:
                raise DataError("'data.split_by': the column has too few values to hold some out and train on others.")
            taken.append(order.pop())
        result[split] = ("train", np.flatnonzero(np.isin(values, taken)).astype(np.int64))
    return {**result, "train": ("train", np.flatnonzero(np.isin(values, order)).astype(np.int64))}


def training_count(images: int, splits: Collection[str], share: float = HELD_OUT) -> int:
    """Return how many of `images` training images `assign` leaves for training, if the source has these splits."""
    return images - round(share * images) * len({"val", "test"}.difference(splits))


def subset(labels: NDArray[np.int64], count: int, seed: int) -> Indices:
    """Return the first `count` images of the stratified order, as sorted positions in `labels`."""
    return np.sort(stratify(labels, seed)[:count])
