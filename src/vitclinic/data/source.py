"""Data sources of any kind: classes, and labelled images in one or more splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data.decoding import Size

SPLITS = ("train", "val", "test")


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

    def __post_init__(self) -> None:
        for split, records in self.splits.items():
            _check_labels(records, len(self.classes), split)
        if "train" in self.splits and not len(self.splits["train"]):
            raise DataError(f"'{self.name}' has no training images.")

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


def describe_unreadable(records: Records, index: int, error: Exception) -> str:
    """Return the message that says which image cannot be read, and why."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{records.name(index)}: not a readable image ({reason})."
