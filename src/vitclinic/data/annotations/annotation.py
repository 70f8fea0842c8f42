"""The annotation of one image: a mask of classes, objects with boxes, questions with answers; and its checks.

Pixels are counted from the upper left corner: a box is (left, top, right, bottom), and a mask of one pixel at row 2 and
column 3 has the box (3, 2, 4, 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data.decoding import Size

VOID = 255
"""The value of pixels of a mask that belong to no class and count nowhere."""

Mask = NDArray[np.uint8]
Boxes = NDArray[np.float64]


@dataclass(frozen=True)
class Objects:
    """The objects of one image.

    Example:
        >>> disc = np.zeros((1, 8, 8), bool)
        >>> disc[0, 2:5, 1:4] = True
        >>> Objects(mask_boxes(disc), np.array([0]), np.array([False]), disc).boxes
        array([[1., 2., 4., 5.]])
    """

    boxes: Boxes
    """[n, 4]: left, top, right, bottom, in pixels."""
    labels: NDArray[np.int64]
    """[n], the class of each."""
    crowd: NDArray[np.bool_]
    """[n], true for a region of many objects, which is not to be found one by one."""
    masks: NDArray[np.bool_] | None = None
    """[n, height, width], the pixels of each, if they are known."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Objects:
        """Return some of the objects."""
        masks = None if self.masks is None else self.masks[rows]
        return Objects(self.boxes[rows], self.labels[rows], self.crowd[rows], masks)


@dataclass(frozen=True)
class Question:
    """A question about an image, with its answers."""

    text: str
    answers: tuple[str, ...]
    """At least one; several, where several people were asked."""


@dataclass(frozen=True)
class Annotation:
    """Mask, objects or questions of one image. A data set has one of the three, its `target`."""

    mask: Mask | None = None
    """[height, width], the class of each pixel, or `VOID`."""
    objects: Objects | None = None
    questions: tuple[Question, ...] = ()


class MaskRecords(Protocol):
    """Protocol of records whose images come with masks."""

    def mask(self, index: int) -> Mask:
        """Return the mask of image `index`, [height, width]."""


class ObjectRecords(Protocol):
    """Protocol of records whose images come with objects."""

    def objects(self, index: int) -> Objects:
        """Return the objects of image `index`, in its own pixels."""


class QuestionRecords(Protocol):
    """Protocol of records whose images come with questions."""

    def questions(self, index: int) -> tuple[Question, ...]:
        """Return the questions about image `index`."""


def mask_boxes(masks: NDArray[np.bool_]) -> Boxes:
    """Return the smallest boxes around masks [n, height, width], none of which is empty."""
    rows: NDArray[np.bool_] = np.asarray(masks.any(2))
    columns: NDArray[np.bool_] = np.asarray(masks.any(1))
    height, width = masks.shape[1:]
    left, top = columns.argmax(1), rows.argmax(1)
    right, bottom = width - columns[:, ::-1].argmax(1), height - rows[:, ::-1].argmax(1)
    return np.stack([left, top, right, bottom], axis=1).astype(np.float64).reshape(-1, 4)


_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)


def upright_size(image: Image.Image) -> Size:
    """Return height and width of an image as it is shown, from its header."""
    turned = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
    return (image.width, image.height) if turned else (image.height, image.width)


def check_annotation(annotation: Annotation, size: Size, classes: int, name: str) -> Annotation:
    """Return an annotation that fits its image.

    Args:
        annotation: The annotation, in the image's own pixels.
        size: Height and width of the image.
        classes: The number of classes of the data set.
        name: What to call the image in messages.

    Raises:
        DataError: It does not fit.
    """
    if annotation.mask is not None:
        _check_mask(annotation.mask, size, classes, name)
    if annotation.objects is not None:
        return replace(annotation, objects=_check_objects(annotation.objects, size, classes, name))
    for question in annotation.questions:
        if not question.text.strip():
            raise DataError(f"{name}: a question is empty.")
        if not any(answer.strip() for answer in question.answers):
            raise DataError(f"{name}: the question '{question.text}' has no answer.")
    return annotation


def _check_mask(mask: Mask, size: Size, classes: int, name: str) -> None:
    if mask.shape != size:
        raise DataError(
            f"{name}: its mask has {' x '.join(map(str, mask.shape))} pixels, and the image {size[0]} x {size[1]}."
        )
    beyond = mask[(mask >= classes) & (mask != VOID)]
    if beyond.size:
        raise DataError(
            f"{name}: its mask has the label {beyond.max()}, and there are {classes} classes, from 0 to {classes - 1}"
            f" ({VOID} is void)."
        )


_TOLERANCE = 1.0
"""Pixels by which a box may leave its image: published boxes are rounded. It is cut at the border."""


def _check_objects(objects: Objects, size: Size, classes: int, name: str) -> Objects:
    """Return the objects with their boxes inside the image."""
    height, width = size
    limits = np.array([width, height, width, height], dtype=np.float64)
    for number, (box, label) in enumerate(zip(objects.boxes, objects.labels, strict=True)):
        shown = ", ".join(f"{side:g}" for side in box)
        if not np.isfinite(box).all() or box[2] <= box[0] or box[3] <= box[1]:
            raise DataError(f"{name}: box {number} ({shown}) has no area; boxes are left, top, right, bottom.")
        if (box < -_TOLERANCE).any() or (box > limits + _TOLERANCE).any():
            raise DataError(f"{name}: box {number} ({shown}) is not inside the image of {width} x {height} pixels.")
        if not 0 <= label < classes:
            raise DataError(f"{name}: object {number} has the label {label}, and there are {classes} classes.")
    if objects.masks is not None and objects.masks.shape != (len(objects), *size):
        found = " x ".join(map(str, objects.masks.shape[1:]))
        raise DataError(f"{name}: the masks of its objects have {found} pixels, and the image {height} x {width}.")
    if objects.masks is not None and len(objects) and not objects.masks.any((1, 2)).all():
        number = int(objects.masks.any((1, 2)).argmin())
        raise DataError(f"{name}: the mask of object {number} is empty.")
    return replace(objects, boxes=np.clip(objects.boxes, 0, limits))
