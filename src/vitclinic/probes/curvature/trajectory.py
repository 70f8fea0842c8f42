"""Training trajectory in polar coordinates [park2022 Fig. 1b]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.past_training import PastWeights
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

Weights = Mapping[str, Tensor]

_ADVICE = "train with checkpoint.keep_epochs=[0,1,2,...] or with logging.trajectory=1000"
_Z = 1.96
"""Standard deviations of a 95% interval."""


@dataclass(frozen=True)
class Polar:
    """Trajectory of weights w_t in polar coordinates around its end."""

    radius: NDArray[np.float64]
    """|D_t| / |D_0|."""
    angle: NDArray[np.float64]
    """Angle between D_t and D_0, in radians; NaN if D_t is zero."""
    distance: float
    """|D_0|."""


def polar_coordinates(start: Weights, final: Weights, states: Iterable[Weights]) -> Polar:
    """Return the polar coordinates of `states` around `final`.

    With D_t = w_t - w_final, r_t = |D_t| / |D_0| and theta_t = arccos(D_t . D_0 / (|D_t| |D_0|)). `states` may be a
    generator; one state is held at a time.

    Example:
        >>> def at(x, y):
        ...     return {"weight": torch.tensor([x, y])}
        >>> polar = polar_coordinates(at(2.0, 0.0), at(0.0, 0.0), [at(2.0, 0.0), at(0.0, 1.0)])
        >>> polar.radius.tolist(), np.degrees(polar.angle).round(6).tolist()
        ([1.0, 0.5], [0.0, 90.0])
    """
    distance = math.sqrt(_products(start, start, final)[0])
    if not 0 < distance < math.inf:
        raise ModelError(f"the distance between the first and the final weights is {distance}.")
    radii, angles = [], []
    for state in states:
        square, along = _products(state, start, final)
        if not math.isfinite(square):
            raise ModelError("some weights are not finite (NaN or infinity).")
        radii.append(math.sqrt(square) / distance)
        cosine = along / (math.sqrt(square) * distance) if square else math.nan
        angles.append(math.acos(min(1.0, max(-1.0, cosine))) if square else math.nan)
        del state  # free it before the next one is made
    return Polar(np.array(radii), np.array(angles), distance)


def mean_turn(radius: NDArray[np.float64], angle: NDArray[np.float64]) -> float:
    """Return the mean turning angle from one step to the next in the (r, theta) plane; the origin is the end.

    It is 0 for a straight line and small for a smooth curve. (The paper judges smoothness by eye.)

    Example:
        >>> mean_turn(np.array([1.0, 0.5]), np.array([0.0, 0.0]))
        0.0
    """
    points = np.append(radius * np.exp(1j * angle), 0)
    steps = np.diff(points)
    steps = steps[steps != 0]
    return float(np.abs(np.angle(steps[1:] / steps[:-1])).mean()) if len(steps) > 1 else 0.0


@torch.no_grad()
def _products(state: Weights, start: Weights, final: Weights) -> tuple[float, float]:
    """Return |D_t|^2 and D_t . D_0, in float64."""
    square = along = 0.0
    for name, end in final.items():
        end = end.double()
        here = (state[name].double() - end).flatten()
        there = (start[name].double() - end).flatten()
        square += float(here @ here)
        along += float(here @ there)
    return square, along


@register
class Trajectory(OwningProbe):
    """Polar coordinates of a run's weights around its final weights, epoch by epoch [park2022 Fig. 1b].

    With D_t = w_t - w_final, r_t = |D_t| / |D_0|, and theta_t is the angle between D_t and D_0. The last point, 0/0, is
    left out. w_t are all parameters (no buffers) of the network; averaged weights (EMA) if the run has them.
    """

    name = "trajectory"
    group = "Curvature"
    rank = 130
    title = "Course of training"
    question = "Did training go straight to where it ended?"
    paper = "Park and Kim 2022, Fig. 1b (P15)"
    key_scalars: ClassVar[KeyScalars] = {"distance": None, "angle_max": None}
    by_default: ClassVar[bool] = False

    source: Literal["any", "checkpoints", "projections"] = Field(
        "any", description="source of the weights; any: checkpoints if they suffice, otherwise projections"
    )

    def forwards(self, subject: Subject) -> float:
        """Return the number of checkpoints: reading one takes about as long as a forward pass."""
        past = _past(subject)
        return 1.0 if past is None else float(len(past.weights) + 1)

    def peak_memory(self, subject: Subject) -> float:
        return 3.0 * subject.footprint.weights  # those of the first epoch, of the last and of one in between

    def conditions(self, subject: Subject) -> dict[str, Any]:
        past = _past(subject)
        return {} if past is None else {"weights": past.digest(), "finished": past.finished}

    def check(self, subject: Subject) -> None:
        past = _past(subject)
        if past is None:
            raise DoesNotApply(
                f"it needs the weights of several epochs of a run: {_ADVICE}, and examine its directory."
            )
        reasons = []
        if self.source != "projections":
            if (shortage := _shortage(past.weights)) is None:
                return
            reasons.append(f"its checkpoints {shortage}")
        if self.source != "checkpoints":
            if (shortage := _shortage(past.projections())) is None:
                return
            reasons.append(f"its projections {shortage}")
        raise DoesNotApply(f"{' and '.join(reasons)}: {_ADVICE}.")

    def measure(self, subject: Subject) -> Result:
        self.check(subject)
        past = _past(subject)
        assert past is not None  # `check` has passed
        if self.source != "projections" and _shortage(past.weights) is None:
            return self._from_checkpoints(subject, past)
        return _from_projections(past.projections(), past)

    def _from_checkpoints(self, subject: Subject, past: PastWeights) -> Result:
        names = [name for name, p in subject.network.named_parameters() if p.is_floating_point()]

        def read(epoch: float) -> Weights:
            stored = past.weights[epoch]()
            return {name: stored[name] for name in names}

        epochs = list(past.weights)

        def states() -> Iterator[Weights]:
            for done, epoch in enumerate(epochs[:-1], start=1):
                yield read(epoch)
                subject.progress(self.name, done, len(epochs) - 1)

        polar = polar_coordinates(read(epochs[0]), read(epochs[-1]), states())
        return _result(epochs[:-1], polar, 0.0, past)


def _past(subject: Subject) -> PastWeights | None:
    return None if subject.training is None else subject.training.past


def _shortage(found: Mapping[float, Any]) -> str | None:
    """Return what a trajectory lacks: a start, an end and something in between."""
    if not found:
        return "are not kept"
    if 0 not in found:
        return "lack epoch 0"
    return "are fewer than three" if len(found) < 3 else None


def _from_projections(projections: Mapping[float, NDArray[np.float64]], past: PastWeights) -> Result:
    epochs = list(projections)
    rows = [{"projection": torch.from_numpy(row)} for row in projections.values()]
    error = 1 / math.sqrt(len(projections[0]))
    return _result(epochs[:-1], polar_coordinates(rows[0], rows[-1], rows[:-1]), error, past)


def _result(epochs: list[float], polar: Polar, error: float, past: PastWeights) -> Result:
    """Return the result; `error` is 1/sqrt(k) for a projection to k numbers, and 0 for the weights themselves.

    With a projection, log r and theta have a standard deviation of sin(theta)/sqrt(k) each, and |D_0| a relative one of
    1/sqrt(2k).
    """
    apart = polar.radius > 0  # weights equal to the final ones have no angle
    radius, angle = polar.radius[apart], polar.angle[apart]
    angle_error = error * np.sin(angle)
    largest = int(angle.argmax())
    return Result(
        {
            "points": Scalar(value=float(len(radius))),
            "distance": _estimate(polar.distance, error / math.sqrt(2) * polar.distance),
            "radius_last": _estimate(float(radius[-1]), float(radius[-1] * angle_error[-1])),
            "angle_last": _estimate(float(angle[-1]), float(angle_error[-1])),
            "angle_max": _estimate(float(angle[largest]), float(angle_error[largest])),
            "turn": Scalar(value=mean_turn(radius, angle)),
            "projection_error": Scalar(value=error),
        },
        arrays={
            "epoch": np.array(epochs)[apart],
            "radius": radius,
            "angle": angle,
            "radius_error": radius * angle_error,
            "angle_error": angle_error,
        },
        status="ok" if past.finished else "not_converged",
        reason=None if past.finished else "the run is not finished; its latest weights stand for the final ones.",
    )


def _estimate(value: float, error: float) -> Scalar:
    if not error:
        return Scalar(value=value)
    return Scalar(value=value, low=max(0.0, value - _Z * error), high=value + _Z * error)
