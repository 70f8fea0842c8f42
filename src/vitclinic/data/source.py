"""A data source, whatever it is made of: classes, and labelled images in one or more splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data.decoding import Size

SPLITS = ("train", "val", "test")


class Records(Protocol):
    """The labelled images of one split, not yet decoded. Picklable, so that workers can read it."""

    labels: NDArray[np.int64]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call image `index` in a message: its file, or its table and row."""

    def read(self, index: int) -> Image.Image:
        """Open image `index`; may raise any of `decoding.UNREADABLE`."""

    def contents(self) -> Sequence[Any]:
        """What identifies the images without decoding them, wherever they lie: one item each."""


class NumberedRecords:
    """The base of records that are identified by their numbers alone: rows of a table, entries of an array."""

    def __init__(self, source: str, labels: ArrayLike) -> None:
        self.source = source
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.source} image {index}"

    def contents(self) -> list[int]:
        return list(range(len(self)))


@dataclass(frozen=True)
class Source:
    """Classes and the splits found at the source: at least one, called `train` where it has no name of its own."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Records]
    fingerprint: str
    """Changes whenever the source changes; cheap, so it may stand for a machine's own paths and times."""
    uniform: tuple[Size, int] | None = None
    """Size and channels of all images, where the source knows them beforehand."""

    def __post_init__(self) -> None:
        for split, records in self.splits.items():
            _check_labels(records, len(self.classes), split)
        if "train" in self.splits and not len(self.splits["train"]):
            raise DataError(f"'{self.name}' has no training images.")

    @property
    def main(self) -> Records:
        """The training images, or those of the first split of a set that has none."""
        return self.splits.get("train") or next(iter(self.splits.values()))


def _check_labels(records: Records, classes: int, split: str) -> None:
    wrong = np.flatnonzero((records.labels < 0) | (records.labels >= classes))
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"{records.name(first)}: label {records.labels[first]} is out of range for {classes} classes"
            f" ({wrong.size} such in the {split} split)."
        )


def unreadable(records: Records, index: int, error: Exception) -> str:
    """The sentence that says which image cannot be read, and why."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{records.name(index)}: not a readable image ({reason})."
