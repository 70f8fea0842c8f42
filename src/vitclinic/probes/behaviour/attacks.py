"""Adversarial attacks: moving images within a small ball towards a higher loss [Goodfellow 2015; Madry 2018].

    x <- project(x + step * d),     onto the ball and [0, 1];  d the steepest direction for g = dCE/dx

d is sign(g) in l_inf and g / |g| in l_2. Neither depends on the length of g, so g is computed up to a positive factor:
the gradient of a very confident network vanishes in its own precision, but its direction does not.

Shapes: B images, C channels, K classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic.data import Batch
from vitclinic.data.corruptions.noise import Ball, Draws, Norm, lengths
from vitclinic.probes.behaviour.behaviour_probe import BehaviourProbe, divide_images
from vitclinic.probes.behaviour.intervals import Correct, drop, share, share_correct
from vitclinic.probes.behaviour.predictions import check_logits, is_correct
from vitclinic.probes.digest import find_packed_weights
from vitclinic.probes.output import read_output
from vitclinic.probes.probe import DoesNotApply, Need, Result
from vitclinic.probes.subject import Subject

Network = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Attack:
    """Attack of `steps` steps of length `step` within a ball: a single step of length epsilon is FGSM, more are PGD.

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
        """Return the attacked images, and for each whether its gradient was zero in some step, [B].

        `start` is added to the images before the first step.
        """
        x_bchw = images if start is None else self.ball.nearest(images, images + start)
        stuck = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        for _ in range(self.steps):
            direction = self.ball.steepest(image_gradient(network, x_bchw, targets))
            stuck |= (direction == 0).flatten(1).all(1)
            x_bchw = self.ball.nearest(images, x_bchw + self.step * direction)
        return x_bchw, stuck


def image_gradient(network: Network, images: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each image's cross-entropy up to a positive factor; zero if there is no gradient."""
    with torch.enable_grad():
        x_bchw = images.detach().requires_grad_()
        logits = read_output(network(x_bchw))
        if not logits.requires_grad:
            return torch.zeros_like(images)
        (gradient,) = torch.autograd.grad(logits, x_bchw, loss_slope(logits.detach(), targets), allow_unused=True)
    return torch.zeros_like(images) if gradient is None else gradient


def loss_slope(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy in the logits [B, K], p - y, divided by the largest wrong probability.

    It is zero if there is only one class.
    """
    own = F.one_hot(targets, logits.shape[1]).bool()
    wrong = logits.double().masked_fill(own, -torch.inf)
    weights = (wrong - wrong.amax(1, keepdim=True)).exp().nan_to_num(0.0)
    return (weights - own * weights.sum(1, keepdim=True)).to(logits.dtype)


def inside(ball: Ball, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """Draw perturbations [B, *shape] uniformly from a ball."""
    if ball.norm == "linf":
        return ball.epsilon * (2 * draws.uniform(*shape) - 1)
    radius = draws.uniform(1, 1, 1) ** (1 / torch.Size(shape).numel())
    return radius * on_surface(ball, draws, shape)


def on_surface(ball: Ball, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    """Draw perturbations [B, *shape] as large as a ball allows: its corners in l_inf, its surface in l_2."""
    noise = draws.normal(*shape)
    if ball.norm == "linf":
        return ball.epsilon * noise.sign()
    return ball.epsilon * noise / lengths(noise).clamp_min(1e-30)


_EPSILON: dict[Norm, float] = {"linf": 2 / 255, "l2": 0.5}
FARTHEST = 1e6
"""Larger than the distance of any two images, but small enough to be squared in float32."""
_CLEARLY = 0.75
"""Minimum share of images on which an attack must be stronger than noise. A meaningless gradient gives a half; two ViTs
trained on CIFAR-10 give all images up to an epsilon of 0.1, and 78 and 82% at 0.5, where a step leads too far."""
_STEP_COSTS = 2
"""Cost of a step in forward passes: one forward, and one for the backward pass to the images."""


def _fraction(value: Any) -> Any:
    """Parse a fraction such as 4/255."""
    written = re.fullmatch(r"(\d+(?:\.\d+)?)/([1-9]\d*)", value) if isinstance(value, str) else None
    return float(written[1]) / int(written[2]) if written else value


class AttackOutcomes:
    """Outcomes of the attack for each image."""

    def __init__(self, images: int) -> None:
        self.clean, self.robust, self.in_noise, self.stuck = (np.zeros(images, np.bool_) for _ in range(4))
        self.above_noise, self.below_noise = (np.zeros(images, np.bool_) for _ in range(2))
        """True if the first attempt leaves the right class a smaller (larger) lead than noise does."""


_COPIES = 4
"""Of the images: clean, at the start, the best so far, with noise."""


class AttackProbe(BehaviourProbe):
    """Base class of FGSM and PGD. Images that are misclassified already are not attacked."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    revision: ClassVar[int] = 3  # also compared with noise by the lead of the right class

    epsilon: Annotated[float, BeforeValidator(_fraction), Field(ge=0, le=FARTHEST)] | None = Field(
        None, description="size of the perturbation, for pixels in [0, 1]; by default 2/255 in linf and 0.5 in l2"
    )
    norm: Norm = Field("linf", description="norm of the perturbation, linf or l2")
    random_start: bool = Field(False, description="start at a random point of the ball instead of the image")
    restarts: Annotated[int, Field(ge=0)] = Field(0, description="additional attempts from random points of the ball")

    @property
    def ball(self) -> Ball:
        return Ball(self.norm, _EPSILON[self.norm] if self.epsilon is None else self.epsilon)

    def check(self, subject: Subject) -> None:
        if find_packed_weights(subject.network):
            raise DoesNotApply("the network has quantized layers, which let no gradient through to the image.")

    def peak_memory(self, subject: Subject) -> float:
        size = min(subject.batch_size, len(subject))
        return subject.footprint.image_gradient(size) + _COPIES * size * subject.footprint.image

    @property
    def attack(self) -> Attack:
        raise TypeError(f"{type(self).__name__} must implement attack.")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) * (2 + (1 + self.restarts) * (_STEP_COSTS * self.attack.steps + 1)))

    def measure(self, subject: Subject) -> Result:
        outcomes = AttackOutcomes(len(subject))

        def measure_batch(batch: Batch) -> int:
            self._measure_batch(subject, batch, outcomes)
            return len(batch)

        divide_images(subject, self.name, len(subject), subject.own_batches(), measure_batch, vars(outcomes).values())
        return self._result(outcomes)

    def _measure_batch(self, subject: Subject, batch: Batch, outcomes: AttackOutcomes) -> None:
        places = batch.indices.numpy()
        # The steps of an attack are finer than half precision.
        images = batch.images.to(torch.promote_types(subject.dtype, torch.float32))
        correct = is_correct(subject, images, batch.targets)
        outcomes.clean[places] = correct
        if not correct.any():
            return
        standing, images, targets = places[correct], images[correct], batch.targets[correct]
        noise = on_surface(self.ball, self._draws("noise", subject, standing), tuple(images.shape[1:])).to(images)
        outcomes.in_noise[standing], in_noise = _answers(subject, self.ball.nearest(images, images + noise), targets)
        for attempt in range(1 + self.restarts):
            if not standing.size:
                break
            attacked, stuck = self._attack(subject, standing, images, targets, attempt)
            outcomes.stuck[standing] |= stuck.cpu().numpy()
            left, lead = _answers(subject, attacked, targets)
            if not attempt:
                outcomes.above_noise[standing], outcomes.below_noise[standing] = lead < in_noise, lead > in_noise
            standing, images, targets = standing[left], images[left], targets[left]
        outcomes.robust[standing] = True

    def _attack(
        self, subject: Subject, places: np.ndarray, images: Tensor, targets: Tensor, attempt: int
    ) -> tuple[Tensor, Tensor]:
        start = None
        if attempt or self.random_start:
            draws = self._draws(f"start {attempt}", subject, places)
            start = inside(self.ball, draws, tuple(images.shape[1:])).to(images)
        return self.attack(lambda x: subject.logits(x.to(subject.dtype)), images, targets, start)

    def _draws(self, purpose: str, subject: Subject, places: np.ndarray) -> Draws:
        return Draws(f"{self.name} {purpose}", subject.seed, subject.images.rows[places], subject.device)

    def _result(self, outcomes: AttackOutcomes) -> Result:
        clean, robust = outcomes.clean, outcomes.robust
        attacked, stuck = int(clean.sum()), int((outcomes.stuck & robust).sum())
        scalars = {
            "clean_accuracy": share_correct(clean),
            "robust_accuracy": share_correct(robust),
            "drop": drop(clean, robust),
            "noise_accuracy": share_correct(outcomes.in_noise),
            "epsilon": Scalar(value=self.ball.epsilon),
        }
        if attacked:
            scalars["success"] = share(attacked - int(robust.sum()), attacked)
            scalars["zero_gradient_share"] = share(stuck, attacked)
        found = Result(scalars, arrays={"clean": clean, "robust": robust})
        return found.unless(weakness(outcomes, stuck))


@torch.no_grad()
def _answers(subject: Subject, images: Tensor, targets: Tensor) -> tuple[Correct, NDArray[np.float64]]:
    """Return which images are classified correctly, and the lead of the right logit over the largest other one."""
    logits = check_logits(subject.logits(images.to(subject.dtype)), subject.name).double()
    own = logits.gather(1, targets[:, None])
    others = logits.scatter(1, targets[:, None], -torch.inf).amax(1)
    correct: Correct = (logits.argmax(1) == targets).cpu().numpy()
    return correct, (own[:, 0] - others).cpu().numpy()


def weakness(outcomes: AttackOutcomes, stuck: int) -> str | None:
    """Return the reason why the robust accuracy may be too high; None if there is none.

    Either there was no gradient to follow, or following it is not clearly better than noise.
    """
    clean, robust, in_noise = outcomes.clean, outcomes.robust, outcomes.in_noise
    attacked = int(clean.sum())
    if stuck:
        return (
            f"the gradient is zero for {stuck} of the {attacked} attacked images, so the attack could not move them: "
            "robust_accuracy is an upper bound."
        )
    by_attack, by_noise = int((clean & ~robust).sum()), int((clean & ~in_noise).sum())
    if by_noise > by_attack:
        return (
            f"random noise of the same size fools the network on {by_noise} images and the attack on {by_attack}: "
            "the gradient is masked, and robust_accuracy is an upper bound."
        )
    above, below = int(outcomes.above_noise.sum()), int(outcomes.below_noise.sum())
    if above < _CLEARLY * (above + below):
        return (
            f"the attack moves only {above} of {above + below} images closer to another class than random noise of the "
            "same size does: the gradient is masked, and robust_accuracy is an upper bound."
        )
    return None
