"""Batches: images with their targets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vitclinic.data.annotations.batch import Annotations


@dataclass(frozen=True)
class Batch:
    """Images with their targets.

    Shapes: B images, C channels, K classes, N patches.

    Example:
        >>> rows = torch.arange(4)
        >>> batch = Batch(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1]), rows, rows)
        >>> [len(part) for part in batch.split(3)]
        [3, 1]
    """

    images: Tensor
    """[B, C, height, width], float, in [0, 1]."""
    targets: Tensor
    """Class indices [B], or shares of the classes [B, K] after mixing or smoothing."""
    indices: Tensor
    """[B], which image of its split each one is."""
    keys: Tensor
    """[B], the sample's random key (see `randomness`) as a signed integer: what a batch transform draws from."""
    patch_targets: Tensor | None = None
    """[B, N, K], where the patches of one image have targets of their own."""
    crops: tuple[Tensor, ...] = ()
    """Further views of the same images, each [B, C, height, width], of any size."""
    teacher: Tensor | None = None
    """[B, ...], what a teacher says of each image."""
    annotations: Annotations | None = None
    """Masks, objects or questions of the images, where the data has them as its target."""

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """Return the batch with images and targets on `device`; indices and keys stay on the CPU.

        Args:
            device: The device to move to.
            dtype: The dtype of floating-point images and targets; class indices keep theirs.
        """

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(device, kind, non_blocking=True)

        return replace(
            self,
            images=move(self.images),
            targets=move(self.targets),
            patch_targets=None if self.patch_targets is None else move(self.patch_targets),
            crops=tuple(move(crop) for crop in self.crops),
            annotations=None if self.annotations is None else self.annotations.to(device, dtype),
        )

    def split(self, size: int | None) -> list[Batch]:
        """Return the batch in parts of `size` images, in order.

        Args:
            size: Images per part; the last part may be smaller. None returns the batch as a single part.
        """
        if size is None or size >= len(self):
            return [self]
        parts: list[Batch] = []
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "crops"}
            part = {name: value[rows] for name, value in values.items() if value is not None}
            parts.append(replace(self, **part, crops=tuple(crop[rows] for crop in self.crops)))
        return parts

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls this method by name."""
        patch = None if self.patch_targets is None else self.patch_targets.pin_memory()
        images, targets = self.images.pin_memory(), self.targets.pin_memory()
        crops = tuple(crop.pin_memory() for crop in self.crops)
        known = None if self.annotations is None else self.annotations.pin_memory()
        return replace(self, images=images, targets=targets, patch_targets=patch, crops=crops, annotations=known)
