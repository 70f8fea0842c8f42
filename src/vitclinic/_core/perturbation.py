"""Small perturbations of images: l_inf and l_2 balls around them, within [0, 1].

Shapes: B images, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["linf", "l2"]


@dataclass(frozen=True)
class Ball:
    """Ball of the images in [0, 1] that differ from given ones by at most `epsilon` in a norm.

    Example:
        >>> x = torch.tensor([[[[0.5, 0.1]]]])
        >>> Ball("linf", 0.2).nearest(x, x + torch.tensor([1.0, -1.0]))
        tensor([[[[0.7000, 0.0000]]]])
        >>> Ball("l2", 0.5).steepest(torch.tensor([[[[3.0, 4.0]]]]))
        tensor([[[[0.6000, 0.8000]]]])
    """

    norm: Norm
    epsilon: float

    def nearest(self, images: Tensor, moved: Tensor) -> Tensor:
        """Project `moved` images [B, C, height, width] into the ball around `images`, then into [0, 1].

        The second projection can only shorten a difference, so that both constraints hold.
        """
        delta = moved - images
        if self.norm == "linf":
            delta = delta.clamp(-self.epsilon, self.epsilon)
        else:
            delta = delta * (self.epsilon / lengths(delta).clamp_min(1e-30)).clamp_max(1)
        return (images + delta).clamp(0, 1)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Return the perturbation of norm 1 along the steepest ascent of a gradient; NaNs count as 0."""
        if self.norm == "linf":
            return gradient.sign().nan_to_num(0.0)
        numbers = gradient.where(gradient.isfinite(), 0.0)
        largest = numbers.abs().amax((1, 2, 3), keepdim=True)
        scaled = numbers / largest.where(largest > 0, 1.0)  # its square can then neither vanish nor overflow
        return scaled / lengths(scaled).clamp_min(1.0)


def lengths(delta: Tensor) -> Tensor:
    """Return the l_2 norm of each difference, [B, 1, 1, 1]."""
    found: Tensor = torch.linalg.vector_norm(delta, dim=(1, 2, 3), keepdim=True)
    return found
