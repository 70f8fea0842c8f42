"""Images moved, within a small ball, towards a higher loss [Goodfellow et al. 2015; Madry et al. 2018].

    x <- nearest image in the ball and in [0, 1] to  x + step * d,     d the steepest direction for dCE/dx

d is sign(g) in l_inf and g / |g| in l_2. Neither depends on the length of the gradient g, which is therefore computed
up to a factor: a network that is sure of itself has no gradient in its own precision, and yet a direction.

Shapes: B images, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitclinic.ball import Ball, lengths
from vitclinic.data.corruptions.drawing import Draws
from vitclinic.probes.subject import as_logits

Network = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Attack:
    """`steps` steps of length `step` within a ball: one of length epsilon is FGSM, more and shorter ones are PGD.

    Example:
        >>> attack = Attack(Ball("linf", 0.1), steps=1, step=0.1)
        >>> def network(x):  # its second class is for a light first pixel
        ...     return torch.stack([0 * x[:, 0, 0, 0], x[:, 0, 0, 0]], 1)
        >>> attack(network, torch.full((1, 1, 1, 2), 0.5), torch.tensor([0]))[0]
        tensor([[[[0.6000, 0.5000]]]])
    """

    ball: Ball
    steps: int
    step: float

    def __call__(
        self, network: Network, images: Tensor, targets: Tensor, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The attacked images, and of each whether its gradient was zero in some step [B].

        `start` is what to add to the images before the first step.
        """
        x_bchw = images if start is None else self.ball.nearest(images, images + start)
        stuck = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        for _ in range(self.steps):
            direction = self.ball.steepest(image_gradient(network, x_bchw, targets))
            stuck |= (direction == 0).flatten(1).all(1)
            x_bchw = self.ball.nearest(images, x_bchw + self.step * direction)
        return x_bchw, stuck


def image_gradient(network: Network, images: Tensor, targets: Tensor) -> Tensor:
    """The gradient of each image's cross-entropy, times some positive number; zero where there is none."""
    with torch.enable_grad():
        x_bchw = images.detach().requires_grad_()
        logits = as_logits(network(x_bchw))
        if not logits.requires_grad:
            return torch.zeros_like(images)
        (gradient,) = torch.autograd.grad(logits, x_bchw, loss_slope(logits.detach(), targets), allow_unused=True)
    return torch.zeros_like(images) if gradient is None else gradient


def loss_slope(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the cross-entropy in the logits [B, K], p - y, divided by the largest p(k) of a wrong class k.

    Zero where there is no wrong class.
    """
    own = F.one_hot(targets, logits.shape[1]).bool()
    wrong = logits.double().masked_fill(own, -torch.inf)
    weights = (wrong - wrong.amax(1, keepdim=True)).exp().nan_to_num(0.0)
    return (weights - own * weights.sum(1, keepdim=True)).to(logits.dtype)


def inside(ball: Ball, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """Changes [B, *shape] drawn uniformly from a ball."""
    if ball.norm == "linf":
        return ball.epsilon * (2 * draws.uniform(*shape) - 1)
    radius = draws.uniform(1, 1, 1) ** (1 / torch.Size(shape).numel())
    return radius * on_surface(ball, draws, shape)


def on_surface(ball: Ball, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """Changes [B, *shape] as large as a ball allows: its corners in l_inf, uniformly from its surface in l_2."""
    noise = draws.normal(*shape)
    if ball.norm == "linf":
        return ball.epsilon * noise.sign()
    return ball.epsilon * noise / lengths(noise).clamp_min(1e-30)
