"""What a rule looks at: the numbers of one network, and of a reference network where the two may be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitclinic.measurement import Measurement, Scalar

TRAINING = {"training.loss": ("train", "loss"), "training.val_nll": ("val", "nll")}
"""Numbers of a run's metrics that rules look at: the kind of row, and its key."""


@dataclass(frozen=True)
class Evidence:
    """The measurements of one network by probe, its training's metrics, and the measurements of a reference."""

    measurements: Mapping[str, Measurement]
    training: Sequence[Mapping[str, Any]] = ()
    reference: Mapping[str, Measurement] = field(default_factory=dict)

    def number(self, name: str) -> Scalar | None:
        """`PROBE.NAME` of the network; None where it was not measured, or is not a number."""
        return _number(self.measurements, name)

    def theirs(self, name: str) -> Scalar | None:
        """The same of the reference network; None also where the two were not measured alike."""
        probe = name.partition(".")[0]
        ours, theirs = usable(self.measurements.get(probe)), usable(self.reference.get(probe))
        if ours is None or theirs is None or not _alike(ours, theirs):
            return None
        return _number(self.reference, name)

    def units(self, probe: str, value: str) -> dict[str, Scalar]:
        """One value of each unit that has it, by unit."""
        measurement = usable(self.measurements.get(probe))
        rows = [] if measurement is None else measurement.units
        return {row.name: row.values[value] for row in rows if value in row.values and _finite(row.values[value])}

    def kinds(self, probe: str) -> list[str]:
        """The kinds of the units that a probe lists."""
        measurement = usable(self.measurements.get(probe))
        return [] if measurement is None else [row.kind for row in measurement.units]

    def curve(self, kind: str, key: str) -> list[float]:
        """A column of the training's rows of one kind; NaN where a number was not finite."""
        rows = [row for row in self.training if row.get("kind") == kind and key in row]
        return [math.nan if row[key] is None else float(row[key]) for row in rows]

    def has(self, name: str) -> bool:
        """Whether a number is there to be looked at."""
        if name in TRAINING:
            return bool(self.curve(*TRAINING[name]))
        probe, _, value = name.partition(".")
        return self.number(name) is not None or bool(self.units(probe, value))


def usable(measurement: Measurement | None) -> Measurement | None:
    """A measurement that has a result: it applied and did not fail."""
    return measurement if measurement is not None and measurement.status in ("ok", "not_converged") else None


def low(number: Scalar) -> float:
    """The lower end of the interval; a number without one is exact."""
    return number.value if number.low is None else number.low


def high(number: Scalar) -> float:
    """The upper end of the interval."""
    return number.value if number.high is None else number.high


def difference(a: Scalar, b: Scalar) -> Scalar:
    """a - b, with the interval of two independent numbers.

    Where the two rise together, as confidence and correctness of the same images do, it is too wide, not too narrow.
    """
    down = math.hypot(a.value - low(a), high(b) - b.value)
    up = math.hypot(high(a) - a.value, b.value - low(b))
    value = a.value - b.value
    return Scalar(value=value, low=value - down, high=value + up)


def shown(number: Scalar) -> str:
    """As a sentence has it: `0.82 (0.80 to 0.84)`."""
    if low(number) == high(number):
        return f"{number.value:.3g}"
    return f"{number.value:.3g} ({low(number):.3g} to {high(number):.3g})"


def _number(measurements: Mapping[str, Measurement], name: str) -> Scalar | None:
    probe, _, key = name.partition(".")
    measurement = usable(measurements.get(probe))
    number = None if measurement is None else measurement.scalars.get(key)
    if measurement is None or number is None or not _finite(number):
        return None
    # What has not converged is known to be inexact: without an interval nobody knows how much.
    return None if measurement.status == "not_converged" and number.low is None else number


def _finite(number: Scalar) -> bool:
    return all(math.isfinite(end) for end in (number.value, low(number), high(number)))


def _alike(ours: Measurement, theirs: Measurement) -> bool:
    """Whether two measurements differ in the network only."""
    return ours.terms == theirs.terms
