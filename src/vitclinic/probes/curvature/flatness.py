"""Average flatness: the training loss under Gaussian noise on the weights [chen2022 Table 1]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.data.randomness import torch_seed
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.curvature_probe import CurvatureProbe
from vitclinic.probes.curvature.displacement import Displacement
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.guards import SAVED_EVERY, Partial
from vitclinic.probes.probe import Cheaper, Result, register
from vitclinic.probes.subject import Subject

FEWEST = 10
"""Minimum number of draws before the standard error is trusted, since it is an estimate itself."""


def sample_losses(
    surface: LossSurface,
    sigma: float,
    draws: int,
    *,
    precision: float = 0.0,
    seed: int = 0,
    known: Sequence[float] = (),
    go_on: Callable[[list[float]], bool] = lambda losses: True,
) -> NDArray[np.float64]:
    """Return L(w + e) for up to `draws` Gaussian e of standard deviation `sigma`; their mean estimates L^N.

    Use it inside `surface.evaluation_mode()`.

    Args:
        surface: The loss surface.
        sigma: Standard deviation of the noise.
        draws: Maximum number of draws.
        precision: Stop when the standard error is at most this share of the mean.
        seed: Seed of the noise.
        known: Losses of the first draws, if known from an earlier attempt.
        go_on: Called with the losses after each draw; stop if it returns False. A loss that is not finite stops, too.
    """
    losses = list(known)
    with Displacement(surface.weights) as displacement:
        while len(losses) < draws and not is_precise(losses, precision) and all(map(math.isfinite, losses[-1:])):
            displacement.by_noise(sigma, torch_seed("flatness", seed, len(losses)))
            losses.append(surface.value())
            if not go_on(losses):
                break
    return np.array(losses)


def is_precise(losses: list[float] | NDArray[np.float64], precision: float) -> bool:
    """Return True if the standard error of the mean is at most `precision` times the mean."""
    enough = precision > 0 and len(losses) >= FEWEST
    return enough and standard_error(losses) <= precision * abs(float(np.mean(losses)))


def standard_error(losses: list[float] | NDArray[np.float64]) -> float:
    """Return the standard error of the mean of two or more losses."""
    return float(np.std(losses, ddof=1)) / math.sqrt(len(losses))


@register
class Flatness(CurvatureProbe):
    """Average flatness L^N: the mean loss under Gaussian noise on the weights [chen2022 Table 1].

    L^N = E[L(w + e)], e ~ N(0, sigma^2 I) over all weights and biases, with softmax cross-entropy and no weight decay.
    To second order it is L(w) + sigma^2/2 trace(H). Only compare values of the same sigma.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> Flatness(draws=3, precision=0)(model, loader).arrays["losses"].shape
        (3,)
    """

    name = "flatness"
    group = "Curvature"
    rank = 220
    title = "Loss under noise"
    question = "How much does the loss rise when weights are disturbed?"
    paper = "Chen et al. 2022, Table 1 (C1)"
    key_scalars: ClassVar[KeyScalars] = {"flatness": "lower"}
    cheaper: ClassVar[Cheaper] = ({"images": 64, "draws": 20}, {"images": 64})

    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.01, description="standard deviation of the noise; use the same to compare networks"
    )
    draws: Annotated[int, Field(ge=2)] = Field(100, description="maximum number of draws (the paper: 1000)")
    precision: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="stop when the standard error is this share of the mean; 0 for all draws"
    )

    def forwards(self, subject: Subject) -> float:
        return (self.draws + 2.0) * len(subject)

    def measure(self, subject: Subject) -> Result:
        clock = Clock(self.budget, distributed=subject.distributed)
        surface = self.surface(subject)

        # Another type of device draws other numbers.
        partial = Partial(subject.scratch.get(self.name), subject.device.type, subject.distributed)
        done = partial.read() or {"losses": np.zeros(0)}

        def go_on(losses: list[float]) -> bool:
            done["losses"] = np.array(losses)
            partial.write(done, every=SAVED_EVERY)
            subject.progress("flatness", len(losses) * len(subject), self.draws * len(subject))
            return not clock.has_expired()

        known = done["losses"].tolist()
        try:
            with surface.evaluation_mode():
                loss = surface.check()
                losses = sample_losses(
                    surface,
                    self.sigma,
                    self.draws,
                    precision=self.precision,
                    seed=subject.seed,
                    known=known,
                    go_on=go_on,
                )
        finally:
            partial.write(done)
        scalars = {
            "flatness": _mean(losses),
            "loss": Scalar(value=loss, n=len(subject)),
            "sigma": Scalar(value=self.sigma),
        }
        if len(losses) > 1 and np.isfinite(losses).all():
            scalars["standard_error"] = Scalar(value=standard_error(losses), n=len(losses))
        reason = self._shortcoming(losses)
        return Result(
            scalars,
            arrays={"losses": losses},
            status="ok" if reason is None else "not_converged",
            reason=reason,
            mode=self.batch_norm,
        )

    def _shortcoming(self, losses: NDArray[np.float64]) -> str | None:
        """Return the reason why the mean is not as precise as requested; None if it is."""
        if not np.isfinite(losses[-1]):
            return f"the loss is {losses[-1]} in draw {len(losses)}, so the mean is not finite; use a smaller sigma."
        if is_precise(losses, self.precision) or (self.precision == 0 and len(losses) == self.draws):
            return None
        known = "unknown" if len(losses) < 2 else f"{standard_error(losses):.2g} and the mean {losses.mean():.4g}"
        wish = f"a share of {self.precision:g}" if self.precision else f"{self.draws} draws"
        if self.precision and len(losses) < FEWEST:
            wish += f", of at least {FEWEST} draws"
        return f"after {len(losses)} draws the standard error is {known}; requested was {wish}."


def _mean(losses: NDArray[np.float64]) -> Scalar:
    """Return the mean with a t interval, if there are two or more finite losses."""
    mean = float(losses.mean())
    if len(losses) < 2 or not math.isfinite(mean):
        return Scalar(value=mean, n=len(losses))
    running = RunningMean()
    running.add(losses)
    half = float(running.half_width())
    return Scalar(value=mean, low=mean - half, high=mean + half, n=len(losses))
