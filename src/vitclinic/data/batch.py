"""The batch that a training or evaluation step receives."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


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
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            parts.append(replace(self, **{name: v[rows] for name, v in values.items() if v is not None}))
        return parts

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls this method by name."""
        patch = None if self.patch_targets is None else self.patch_targets.pin_memory()
        images, targets = self.images.pin_memory(), self.targets.pin_memory()
        return replace(self, images=images, targets=targets, patch_targets=patch)
