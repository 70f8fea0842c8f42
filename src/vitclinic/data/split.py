"""Splits: images of a store with their labels; their names, columns and sizes; and two of them as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.io import fingerprint
from vitclinic.data.annotations.annotation import Annotation
from vitclinic.data.annotations.store import AnnotationStore, JoinedAnnotations
from vitclinic.data.decoding import UNREADABLE, Images
from vitclinic.data.source import ComputedRecords, Records

if TYPE_CHECKING:
    from vitclinic.data.token_labels import LabelMaps


class Store(Protocol):
    """Protocol of the readable images of a source split."""

    digest: str
    skipped: list[str]
    kept: NDArray[np.int64]
    """Indices of the source's records that it contains."""

    def read(self, indices: NDArray[np.int64]) -> Images: ...


@dataclass(frozen=True)
class Split:
    """Images of a source split, or some of them, with their labels.

    Example:
        >>> from vitclinic.data import open_data
        >>> test = open_data("digits").test
        >>> len(test), test.read(np.array([0, 1])).shape
        (180, (2, 8, 8, 1))
    """

    images: Store
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None
    """The group of each image (`data.group`), such as its camera."""
    annotations: AnnotationStore | None = None
    """What the store's images come with beside a class (`data.target`)."""
    label_maps: LabelMaps | None = None
    """Soft labels of the parts of each image (`task.token_labels`)."""
    queries: NDArray[np.bool_] | None = None
    """True for queries, False for the gallery in which they look, where the data tells them apart."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[np.int64]) -> Split:
        """Return some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        queries = None if self.queries is None else self.queries[rows]
        maps = None if self.label_maps is None else self.label_maps.take(rows)
        return Split(self.images, self.rows[rows], self.labels[rows], groups, self.annotations, maps, queries)

    def read(self, indices: NDArray[np.int64]) -> Images:
        """Return the pixels of the images at `indices` in this split, uint8 [B, height, width, C]."""
        return self.images.read(self.rows[indices])

    def annotate(self, indices: NDArray[np.int64]) -> list[Annotation]:
        """Return the annotations of the images at `indices`, in the pixels that `read` returns."""
        assert self.annotations is not None
        return self.annotations.read(self.rows[indices])


class Joined:
    """Store of the images of two stores, one after the other."""

    def __init__(self, first: Store, second: Store) -> None:
        self.first, self.second, self.border = first, second, len(first.kept)
        self.digest = fingerprint(first.digest, second.digest)
        self.skipped = [*first.skipped, *second.skipped]
        self.kept = np.concatenate((first.kept, self.border + second.kept))

    def read(self, indices: NDArray[np.int64]) -> Images:
        behind = indices >= self.border
        first, second = self.first.read(indices[~behind]), self.second.read(indices[behind] - self.border)
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
            images = np.empty((len(indices), *first.shape[1:]), dtype=np.uint8)
            images[~behind], images[behind] = first, second
            return images
        return _Interleaved(first, second, behind)


class _Interleaved:
    """Originals of two stores in the order of `behind`, which is true for those of the second."""

    def __init__(self, first: Images, second: Images, behind: NDArray[np.bool_]) -> None:
        assert not isinstance(first, np.ndarray)
        self.first, self.second, self.behind, self.framed = first, second, behind, first.framed

    def __len__(self) -> int:
        return len(self.behind)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        parts = iter(self.first), iter(self.second)
        for behind in self.behind:
            yield next(parts[int(behind)])


def merge_val(train: Split, val: Split) -> dict[str, Split]:
    """Return the train split with the val images in it, and an empty val split."""
    labels = np.concatenate((train.labels, val.labels))
    groups = None
    if train.groups is not None and val.groups is not None:
        groups = np.concatenate((train.groups, val.groups))
    empty = val.take(np.empty(0, dtype=np.int64))
    if train.images is not val.images:
        rows = np.concatenate((train.rows, len(train.images.kept) + val.rows))
        annotations = None
        if train.annotations is not None and val.annotations is not None:
            annotations = JoinedAnnotations(train.annotations, val.annotations, len(train.images.kept))
        return {"train": Split(Joined(train.images, val.images), rows, labels, groups, annotations), "val": empty}
    rows = np.concatenate((train.rows, val.rows))
    joined = Split(train.images, rows, labels, groups, train.annotations)
    return {"train": joined.take(np.argsort(rows)), "val": empty}


RECORDS: WeakKeyDictionary[Store, Records] = WeakKeyDictionary()
"""What the images of open stores are made from; not a part of them, since workers get copies of these."""


def name_images(split: Split) -> list[str]:
    """Return the names of the images of a split, in order: their files, or their table and row.

    Example:
        >>> from vitclinic.data import open_data
        >>> name_images(open_data("digits").test)[0]
        'digits image 1'
    """
    return [_name_image(split.images, int(row)) for row in split.rows]


def _name_image(store: Store, row: int) -> str:
    if isinstance(store, Joined):
        inside, first = row - store.border, row < store.border
        return _name_image(store.first, row) if first else _name_image(store.second, inside)
    records = RECORDS.get(store)
    return f"image {row}" if records is None else records.name(int(store.kept[row]))


def read_columns(split: Split) -> dict[str, NDArray[np.str_]]:
    """Return the columns that the data has beside image and label, such as the camera, as text for each image.

    Example:
        >>> from vitclinic.data import open_data
        >>> read_columns(open_data("digits").test)
        {}
    """
    records = RECORDS.get(split.images)
    codes: Mapping[str, NDArray[np.int64]] = getattr(records, "columns", {})
    values: Mapping[str, NDArray[np.str_]] = getattr(records, "column_values", {})
    rows = split.images.kept[split.rows] if codes else split.rows
    return {name: values[name][code[rows]] for name, code in codes.items()}


def read_sizes(split: Split) -> NDArray[np.int64] | None:
    """Return (height, width) of the image files of a split, before they were resized; None if there are none.

    Only the headers of files are read.

    Example:
        >>> from vitclinic.data import open_data
        >>> read_sizes(open_data("digits").test) is None  # drawn or packed, not in files
        True
    """
    records = RECORDS.get(split.images)
    if records is None or isinstance(records, ComputedRecords):
        return None
    sizes = np.zeros((len(split), 2), np.int64)
    for place, row in enumerate(split.images.kept[split.rows]):
        try:
            with records.read(int(row)) as image:
                sizes[place] = image.height, image.width
        except UNREADABLE:  # it was readable when it was decoded
            return None
    return sizes
