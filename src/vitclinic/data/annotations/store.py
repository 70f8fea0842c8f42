"""Stores of annotations: fitted once to the stored pixels and read from the cache, or one by one beside the originals.

The cache is that of the images, with its checks. A mask is stored as a grey image; an object as a row of bytes, seven
numbers (its image, box, label, crowd) and, if its pixels are known, these, one bit each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint
from vitclinic.data.annotations.annotation import (
    Annotation,
    MaskRecords,
    ObjectRecords,
    Objects,
    QuestionRecords,
    check_annotation,
    upright_size,
)
from vitclinic.data.annotations.geometry import choose_window
from vitclinic.data.cache import CachedImages, Progress, StreamedImages, open_cached_images
from vitclinic.data.decoding import UNREADABLE, Size, is_photo
from vitclinic.data.source import NumberedRecords, Records

Rows = NDArray[np.int64]


class AnnotationStore(Protocol):
    """Protocol of the annotations of a store's images, in the pixels that it returns."""

    digest: str

    def read(self, rows: Rows) -> list[Annotation]: ...


def open_annotations(
    target: str,
    records: Records,
    images: CachedImages | StreamedImages,
    classes: int,
    key: str,
    size: Size,
    progress: Progress,
    own_size: Size | None = None,
) -> AnnotationStore:
    """Open the annotations of a split.

    Args:
        target: `mask`, `objects` or `questions`.
        records: The records, which have a method of that name (`mask`, `objects`, `questions`).
        images: The store of their images.
        classes: The number of classes.
        key: The name of the cache entry.
        size: The size of the stored pixels.
        progress: Called with (what is being done, how many are done, how many there are).
        own_size: The size of all images, where it is known without looking at each.

    Raises:
        DataError: An annotation does not fit its image.
    """
    read = _Reader(target, records, classes, own_size)
    if target == "questions":
        return StoredQuestions(read, images.kept)
    if isinstance(images, StreamedImages):
        return StreamedAnnotations(read, images.kept, None if is_photo(size) else size)
    if target == "mask":
        masks = _MaskPictures(read, images.kept, size)
        return CachedMasks(open_cached_images(masks, key, size, 1, "raise", progress))
    objects = _ObjectPictures(read, images.kept, size)
    table = open_cached_images(objects, key, objects.shape, 1, "raise", progress)
    return CachedObjects(table, size, len(images.kept))


def read_questions(records: Records, kept: Rows) -> AnnotationStore:
    """Return the questions about the images `kept` of a split, checked.

    Raises:
        DataError: A question is empty, or has no answer.
    """
    return StoredQuestions(_Reader("questions", records, 0, None), kept)


class _Reader:
    """Annotations of records, checked against their images."""

    def __init__(self, target: str, records: Records, classes: int, own_size: Size | None) -> None:
        self.target, self.records, self.classes, self.own_size = target, records, classes, own_size

    def __call__(self, index: int) -> tuple[Annotation, Size]:
        """Return the annotation of a record and the size of its image, both as in its file."""
        name = self.records.name(index)
        try:
            if self.target == "questions":
                found, size = Annotation(questions=cast(QuestionRecords, self.records).questions(index)), (0, 0)
            else:
                size = self.own_size or self._look_at(index)
                if self.target == "mask":
                    found = Annotation(mask=cast(MaskRecords, self.records).mask(index))
                else:
                    found = Annotation(objects=cast(ObjectRecords, self.records).objects(index))
        except UNREADABLE as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise DataError(f"{name}: its {self.target} cannot be read ({reason}).") from error
        return check_annotation(found, size, self.classes, name), size

    def _look_at(self, index: int) -> Size:
        with self.records.read(index) as image:
            return upright_size(image)

    def fitted(self, index: int, size: Size) -> Annotation:
        """Return the annotation of a record in the pixels of its fitted image."""
        annotation, own = self(index)
        return choose_window(own, size).move(annotation)


class _MaskPictures(NumberedRecords):
    """Fitted masks, to be stored as grey images."""

    def __init__(self, read: _Reader, kept: Rows, size: Size) -> None:
        super().__init__("masks", np.zeros(len(kept), np.int64))
        self._read, self._kept, self._size = read, kept, size

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self._fitted(index))

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        for row in range(len(self._kept)):
            yield self._fitted(row)[:, :, None]

    def _fitted(self, row: int) -> NDArray[np.uint8]:
        mask = self._read.fitted(int(self._kept[row]), self._size).mask
        assert mask is not None
        return mask


class CachedMasks:
    """Masks from the cache."""

    def __init__(self, images: CachedImages) -> None:
        self.images, self.digest = images, images.digest

    def read(self, rows: Rows) -> list[Annotation]:
        return [Annotation(mask=mask[:, :, 0]) for mask in self.images.read(rows)]


_NUMBERS = 7
_BYTES = _NUMBERS * 8


class _ObjectPictures(NumberedRecords):
    """Objects of fitted images, to be stored as rows of bytes, [1, bytes, 1] each."""

    def __init__(self, read: _Reader, kept: Rows, size: Size) -> None:
        # How many objects there are is known when they are stored; none has a label here.
        super().__init__("objects", np.broadcast_to(np.int64(0), (2**40,)))
        self._read, self._kept, self._size = read, kept, size
        self._count = 0
        pixels = -(-size[0] * size[1] // 8)
        self.shape = (1, _BYTES + (pixels if self._are_outlined() else 0))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Image.Image:
        raise OSError("objects are no images")

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        rows = []
        for image, index in enumerate(self._kept):
            objects = self._read.fitted(int(index), self._size).objects
            assert objects is not None
            rows += [_object_row(image, objects, number) for number in range(len(objects))]
        if any(len(row) != self.shape[1] for row in rows):
            raise DataError("Some images have the masks of their objects and others do not: give all of them, or none.")
        self._count = len(rows)
        for row in rows:
            yield row[None, :, None]

    def _are_outlined(self) -> bool:
        """Return True if the first image with objects has their masks."""
        records = cast(ObjectRecords, self._read.records)
        found = (records.objects(int(index)) for index in self._kept)
        first = next((objects for objects in found if len(objects)), None)
        return first is not None and first.masks is not None


def _object_row(image: int, objects: Objects, number: int) -> NDArray[np.uint8]:
    numbers = [image, *objects.boxes[number], objects.labels[number], objects.crowd[number]]
    row = np.asarray(numbers, dtype="<f8").view(np.uint8)
    if objects.masks is None:
        return row
    return np.concatenate([row, np.packbits(objects.masks[number].reshape(-1))])


class CachedObjects:
    """Objects from the cache."""

    def __init__(self, table: CachedImages, size: Size, count: int) -> None:
        self.table, self.size, self.digest = table, size, table.digest
        numbers = np.ascontiguousarray(table.images[:, 0, :_BYTES, 0]).view("<f8").reshape(-1, _NUMBERS)
        self.numbers: NDArray[np.float64] = numbers.astype(np.float64)
        self.starts = np.searchsorted(self.numbers[:, 0], np.arange(count + 1))

    def read(self, rows: Rows) -> list[Annotation]:
        return [Annotation(objects=self._read(int(row))) for row in rows]

    def _read(self, row: int) -> Objects:
        of_image = slice(self.starts[row], self.starts[row + 1])
        numbers = self.numbers[of_image]
        masks = None
        if self.table.images.shape[2] > _BYTES:
            bits = np.asarray(self.table.images[of_image, 0, _BYTES:, 0])
            masks = np.unpackbits(bits, axis=1, count=self.size[0] * self.size[1]).astype(bool)
            masks = masks.reshape(-1, *self.size)
        return Objects(numbers[:, 1:5].copy(), numbers[:, 5].astype(np.int64), numbers[:, 6] > 0, masks)


class StoredQuestions:
    """Questions, which the records keep themselves."""

    def __init__(self, read: _Reader, kept: Rows) -> None:
        self._questions = [read(int(index))[0] for index in kept]
        plain = [[(each.text, each.answers) for each in found.questions] for found in self._questions]
        self.digest = fingerprint("questions", plain)

    def read(self, rows: Rows) -> list[Annotation]:
        return [self._questions[row] for row in rows]


class StreamedAnnotations:
    """Annotations of a large set, read beside its images; fitted to `size` where the images are."""

    def __init__(self, read: _Reader, kept: Rows, size: Size | None) -> None:
        self._read, self.kept, self.size = read, kept, size
        contents: Sequence[Any] = read.records.contents()
        self.digest = fingerprint("streamed", read.target, contents)

    def read(self, rows: Rows) -> list[Annotation]:
        if self.size is None:
            return [self._read(int(index))[0] for index in self.kept[rows]]
        return [self._read.fitted(int(index), self.size) for index in self.kept[rows]]


class JoinedAnnotations:
    """Annotations of two stores, one after the other."""

    def __init__(self, first: AnnotationStore, second: AnnotationStore, border: int) -> None:
        self.first, self.second, self.border = first, second, border
        self.digest = fingerprint(first.digest, second.digest)

    def read(self, rows: Rows) -> list[Annotation]:
        behind = rows >= self.border
        parts = iter(self.first.read(rows[~behind])), iter(self.second.read(rows[behind] - self.border))
        return [next(parts[int(later)]) for later in behind]
