"""The annotations of a batch of images, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitclinic.data.annotations.annotation import Annotation, Objects, Question, mask_boxes
from vitclinic.data.decoding import Size


@dataclass(frozen=True)
class Annotations:
    """Masks, objects or questions of the images of a batch.

    Example:
        >>> batch = Annotations.join([Annotation(mask=np.zeros((8, 8), np.uint8))] * 3)
        >>> batch.masks.shape, len(batch[1:])
        (torch.Size([3, 8, 8]), 2)
    """

    masks: Tensor | None = None
    """[B, height, width], uint8: the class of each pixel, 255 for none."""
    objects: tuple[dict[str, Tensor], ...] = ()
    """The objects of each image, as torchvision's detectors take them: `boxes` [n, 4] (left, top, right, bottom),
    `labels` [n], from 0, `iscrowd` [n], and `masks` [n, height, width], uint8, if they are known."""
    questions: tuple[tuple[Question, ...], ...] = ()
    """The questions about each image."""

    @staticmethod
    def join(annotations: Sequence[Annotation]) -> Annotations:
        """Return the annotations of several images, all of one kind and size."""
        first = annotations[0]
        if first.mask is not None:
            return Annotations(masks=torch.from_numpy(np.stack([_mask_of(each) for each in annotations])))
        if first.objects is not None:
            return Annotations(objects=tuple(_as_tensors(_objects_of(each)) for each in annotations))
        return Annotations(questions=tuple(each.questions for each in annotations))

    @staticmethod
    def blank(target: str, images: int, size: Size, questions: int = 1) -> Annotations:
        """Return annotations of the right shapes for so many images, to plan a run by; of each so many questions."""
        if target == "mask":
            return Annotations.join([Annotation(mask=np.zeros(size, np.uint8))] * images)
        if target == "questions":
            asked = (Question("how many circles are there", ("1",)),) * questions
            return Annotations.join([Annotation(questions=asked)] * images)
        masks = np.ones((1, *size), bool)
        whole = Objects(mask_boxes(masks), np.zeros(1, np.int64), np.zeros(1, bool), masks)
        return Annotations.join([Annotation(objects=whole)] * images)

    def __len__(self) -> int:
        return len(self.questions or self.objects) if self.masks is None else len(self.masks)

    def __getitem__(self, rows: slice) -> Annotations:
        masks = None if self.masks is None else self.masks[rows]
        return Annotations(masks, self.objects[rows], self.questions[rows])

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Annotations:
        """Return the annotations on `device`, with boxes of type `dtype`."""

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(device, kind, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> Annotations:
        """Return the annotations in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        masks = [] if self.masks is None else [self.masks]
        return [*masks, *(tensor for each in self.objects for tensor in each.values())]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Annotations:
        masks = None if self.masks is None else change(self.masks)
        objects = tuple({name: change(tensor) for name, tensor in each.items()} for each in self.objects)
        return Annotations(masks, objects, self.questions)


def _mask_of(annotation: Annotation) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    assert annotation.mask is not None
    return annotation.mask


def _objects_of(annotation: Annotation) -> Objects:
    assert annotation.objects is not None
    return annotation.objects


def _as_tensors(objects: Objects) -> dict[str, Tensor]:
    found = {
        "boxes": torch.from_numpy(objects.boxes).float().reshape(-1, 4),
        "labels": torch.from_numpy(objects.labels),
        "iscrowd": torch.from_numpy(objects.crowd),
    }
    if objects.masks is not None:
        found["masks"] = torch.from_numpy(objects.masks.astype(np.uint8))
    return found
