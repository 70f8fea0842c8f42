"""Windows on an image, through which pixels, masks and boxes are seen alike.

A window shows a box of the image, resized, in a box of the frame, mirrored or not. What the image does not cover is
black, void in masks and in no object. Objects that a window does not show are not in its annotation.

Shapes: H x W pixels of the image, h x w of the frame, n objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic.data.annotations.annotation import VOID, Annotation, Boxes, Mask, Objects, mask_boxes
from vitclinic.data.decoding import Images, Pixels, Size, as_image

_LEAST_SIDE = 1.0
"""Pixels that must be left of both sides of a box at the border; less of an object is not shown."""


@dataclass(frozen=True)
class Window:
    """A view of an image: `shown`, a box of it, resized to `place`, a box of the frame, and mirrored or not.

    Example:
        >>> window = Window((4, 4), shown=(2.0, 0.0, 4.0, 2.0), place=(0, 0, 4, 4), mirrored=True)
        >>> window.move_boxes(np.array([[2.0, 0.0, 3.0, 1.0]]))
        array([[2., 0., 4., 2.]])
    """

    frame: Size
    shown: tuple[float, float, float, float]
    """Left, top, right, bottom in the image."""
    place: tuple[int, int, int, int]
    """Left, top, right, bottom in the frame, before it is mirrored."""
    mirrored: bool = False

    def is_whole(self, size: Size) -> bool:
        """Return True if it shows an image of this size as it is."""
        whole = np.array((0, 0, size[1], size[0]))
        covered = np.array_equal(self.shown, whole) and np.array_equal(self.place, whole)
        return self.frame == size and covered and not self.mirrored

    def move_pixels(self, image: Pixels) -> Pixels:
        """Return the pixels of the frame, [h, w, C]."""
        if self.is_whole((image.shape[0], image.shape[1])):
            return image
        placed = self._resize(as_image(image), Image.Resampling.BICUBIC).reshape(*self._extent, image.shape[2])
        return self._put(placed, np.zeros((*self.frame, image.shape[2]), np.uint8))

    def move_mask(self, mask: Mask, outside: int = VOID) -> Mask:
        """Return the mask of the frame, [h, w]: the label of the nearest pixel, and `outside` beyond the image."""
        if self.is_whole((mask.shape[0], mask.shape[1])):
            return mask
        placed = self._resize(Image.fromarray(mask), Image.Resampling.NEAREST)
        return self._put(placed, np.full(self.frame, outside, np.uint8))

    def move_boxes(self, boxes: Boxes) -> Boxes:
        """Return boxes [n, 4] of the frame, cut at the border of what is shown; some may have no area."""
        factors = [self._extent[axis] / (self.shown[3 - axis] - self.shown[1 - axis]) for axis in (1, 0)]
        moved = np.empty_like(boxes)
        for axis, factor in enumerate(factors):  # x, then y
            ends = self.place[axis] + (boxes[:, axis::2] - self.shown[axis]) * factor
            moved[:, axis::2] = np.clip(ends, self.place[axis], self.place[axis + 2])
        if self.mirrored:
            moved[:, 0::2] = self.frame[1] - moved[:, 2::-2]
        return moved

    def move(self, annotation: Annotation) -> Annotation:
        """Return the annotation of the frame; questions stay as they are."""
        mask = None if annotation.mask is None else self.move_mask(annotation.mask)
        objects = None if annotation.objects is None else self._move_objects(annotation.objects)
        return Annotation(mask, objects, annotation.questions)

    def _move_objects(self, objects: Objects) -> Objects:
        """Return the objects that are seen; where their pixels are known, boxes are those of the pixels seen."""
        if objects.masks is None:
            boxes = self.move_boxes(objects.boxes)
            seen = np.asarray((boxes[:, 2:] - boxes[:, :2] >= _LEAST_SIDE).all(1))
            return Objects(boxes, objects.labels, objects.crowd).take(seen)
        masks = np.zeros((len(objects), *self.frame), bool)
        for row, mask in enumerate(objects.masks):
            masks[row] = self.move_mask(mask.astype(np.uint8), outside=0) > 0
        seen = np.asarray(masks.any((1, 2)))
        kept = objects.take(seen)
        return Objects(mask_boxes(masks[seen]), kept.labels, kept.crowd, masks[seen])

    @property
    def _extent(self) -> Size:
        return self.place[3] - self.place[1], self.place[2] - self.place[0]

    def _resize(self, image: Image.Image, how: Image.Resampling) -> NDArray[np.uint8]:
        height, width = self._extent
        return np.asarray(image.resize((width, height), how, box=self.shown))

    def _put(self, placed: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        left, top, right, bottom = self.place
        frame[top:bottom, left:right] = placed
        return np.ascontiguousarray(frame[:, ::-1]) if self.mirrored else frame


def choose_window(
    size: Size, frame: Size, scale: float = 1.0, at: tuple[float, float] = (0.5, 0.5), mirrored: bool = False
) -> Window:
    """Return the window that shows an image `scale` times as large as just covers the frame.

    Args:
        size: Height and width of the image.
        frame: Height and width of the frame.
        scale: Above 1, a part of the image is shown; below, the image does not fill the frame.
        at: Where the window lies, down and across, from 0 to 1: what is cut off, or left free, is divided so.
        mirrored: Swap left and right.
    """
    factor = scale * max(frame[0] / size[0], frame[1] / size[1])
    shown, place = [0.0] * 4, [0] * 4
    for axis in (0, 1):  # down, across
        length = size[axis] * factor
        first, last = 1 - axis, 3 - axis
        if length >= frame[axis] - 1e-6:
            seen = min(frame[axis] / factor, size[axis])
            shown[first] = at[axis] * (size[axis] - seen)
            shown[last] = shown[first] + seen
            place[last] = frame[axis]
        else:
            extent = max(1, round(length))
            shown[last] = size[axis]
            place[first] = int(at[axis] * (frame[axis] - extent + 1 - 1e-9))
            place[last] = place[first] + extent
    left, top, right, bottom = shown
    return Window(frame, (left, top, right, bottom), (place[0], place[1], place[2], place[3]), mirrored)


def fit_annotated(
    images: Images, annotations: Sequence[Annotation], size: Size
) -> tuple[NDArray[np.uint8], list[Annotation]]:
    """Return images as evaluation sees them, [B, h, w, C], with their annotations: resized to cover, at the centre."""
    windows = [choose_window((image.shape[0], image.shape[1]), size) for image in images]
    pixels = np.stack([window.move_pixels(image) for window, image in zip(windows, images, strict=True)])
    return pixels, [window.move(annotation) for window, annotation in zip(windows, annotations, strict=True)]
