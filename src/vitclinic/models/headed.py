"""A backbone with the head of a task on it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Headed(nn.Module):
    """A backbone with the head of a task on it, which reads more of it than its output.

    Treatments, initial weights and the anatomy know the backbone alone. Subclasses add a head and define `forward`.

    Args:
        backbone: The network, as it classifies or without a classifier.
    """

    is_headed = True
    """What the anatomy knows it by: what is inside `backbone` is the network."""

    returns_tensor = True
    """False for a head that returns something else for an image; the probes of features then see the backbone alone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Any:
        """Return the outputs of the task for normalized images [B, C, H, W]."""
        raise TypeError(f"{type(self).__name__} must implement forward().")

    def outputs(self, images: Tensor) -> list[Tensor]:
        """Return all tensors that the losses are of, to see which parameters they depend on."""
        return [self(images)]
