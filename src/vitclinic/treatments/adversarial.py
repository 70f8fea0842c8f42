"""Fast adversarial training: FGSM with a random start [chen2022 App. B; Wong et al., ICLR 2020].

    x0    = clamp(x + u),                       u uniform in [-epsilon, epsilon], clamp to [0, 1]
    delta = clip(x0 - x + a sign(dL/dx(x0))),   clip to [-epsilon, epsilon]
    the step trains on clamp(x + delta)

Shapes: B images, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitclinic.data import Batch
from vitclinic.data.corruptions.noise import Ball
from vitclinic.data.randomness import uniforms
from vitclinic.treatments.treatment import InputAscent, Treatment, register


@register
class Adversarial(Treatment):
    """Fast adversarial training: FGSM from a random start [chen2022 App. B, Eq. 5; Wong et al., ICLR 2020].

    With `sam` in the same list, weights and images climb in one backward pass.

    Attributes:
        epsilon: Largest change of a pixel, for pixels in [0, 1].
        step: Length of the signed gradient step, in units of epsilon.
    """

    name: ClassVar[str] = "adversarial"
    paper: ClassVar[str] = "chen2022 App. B, Eq. 5"
    changes: ClassVar[str] = "the images of a step: moved by up to epsilon a pixel towards a higher loss"
    costs: ClassVar[str] = (
        "one more forward pass and a backward pass to the images a step; with sam nothing beyond sam's"
    )

    epsilon: Annotated[float, Field(ge=0, le=1)] = Field(2 / 255, description="largest change of a pixel in [0, 1]")
    step: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.25, description="length of the ascent, in epsilons"
    )

    def input_ascent(self) -> InputAscent:
        return FastGradientSign(self.epsilon, self.step * self.epsilon)

    def passes(self) -> float:
        return 1 + 2 / 3  # a backward pass to the images only costs half of one that includes the weights


@dataclass(frozen=True)
class FastGradientSign:
    """One signed gradient step of `step` from a random start, within `epsilon` of the images and within [0, 1].

    The start is drawn from each sample's own key, so it does not depend on batch size or number of processes.

    Example:
        >>> keys = torch.tensor([7])
        >>> batch = Batch(torch.full((1, 1, 1, 2), 0.5), torch.tensor([0]), torch.tensor([0]), keys)
        >>> attack = FastGradientSign(epsilon=0.1, step=0.2)
        >>> started = attack.start(batch)
        >>> (started.images * torch.tensor([1.0, -1.0])).sum().backward()
        >>> attack.finish(batch, started).images
        tensor([[[[0.6000, 0.4000]]]])
    """

    epsilon: float
    step: float

    def start(self, batch: Batch) -> Batch:
        """Return the batch at its random start, with images that require a gradient."""
        offset = self.epsilon * (2 * _noise(batch) - 1)
        return replace(batch, images=(batch.images + offset).clamp(0, 1).requires_grad_())

    def finish(self, batch: Batch, started: Batch) -> Batch:
        """Return the batch to train on.

        Raises:
            ValueError: There was no backward pass through `started`.
        """
        with torch.no_grad():
            gradient = started.images.grad
            if gradient is None:
                raise ValueError(
                    "No backward pass has reached the started images; call backward() on their loss first."
                )
            ball = Ball("linf", self.epsilon)
            # If an overflow left NaN, the pixel stays at its start.
            return replace(
                batch, images=ball.nearest(batch.images, started.images + self.step * ball.steepest(gradient))
            )


def _noise(batch: Batch) -> Tensor:
    """Draw uniform numbers in [0, 1) of the images' shape from each sample's key."""
    words = uniforms(batch.keys.numpy().view(np.uint64), "adversarial", 1)[:, 0] * 2.0**53
    generator = torch.Generator()
    shape = batch.images.shape[1:]
    noise_bchw = torch.stack([torch.rand(shape, generator=generator.manual_seed(int(word))) for word in words])
    return noise_bchw.to(batch.images)
