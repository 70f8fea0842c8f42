"""What a step of training or evaluation receives."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Images with their targets.

    Shapes: B images, C channels, K classes, N patches.
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

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
        """Images and targets on `device`, floating-point ones as `dtype`; indices and keys stay on the CPU."""

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(device, kind, non_blocking=True)

        return replace(
            self,
            images=move(self.images),
            targets=move(self.targets),
            patch_targets=None if self.patch_targets is None else move(self.patch_targets),
        )

    def split(self, size: int | None) -> list[Batch]:
        """Parts of `size` images in order, the last one possibly smaller; the whole where there is no size."""
        if size is None or size >= len(self):
            return [self]
        parts: list[Batch] = []
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            parts.append(replace(self, **{name: v[rows] for name, v in values.items() if v is not None}))
        return parts

    def pin_memory(self) -> Batch:
        """In page-locked memory: the name that torch's DataLoader looks for."""
        patch = None if self.patch_targets is None else self.patch_targets.pin_memory()
        images, targets = self.images.pin_memory(), self.targets.pin_memory()
        return replace(self, images=images, targets=targets, patch_targets=patch)
