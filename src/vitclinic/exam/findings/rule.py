"""Rules: what one looks at (`Evidence`), what it is (`Rule`, made by the decorator `rule`) and how it compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitclinic._core.records import Basis, Finding, Measurement, Scalar, Suggestion
from vitclinic._core.registry import load_entry_points

ENTRY_POINTS = "vitclinic.rules"
TRAINING = {"training.loss": ("train", "loss"), "training.val_nll": ("val", "nll")}
"""Numbers of a run's metrics that rules look at: the kind of row, and its key."""


@dataclass(frozen=True)
class Evidence:
    """The measurements of one network by probe, its training's metrics, and the measurements of a reference."""

    measurements: Mapping[str, Measurement]
    training: Sequence[Mapping[str, Any]] = ()
    reference: Mapping[str, Measurement] = field(default_factory=dict)

    def number(self, name: str) -> Scalar | None:
        """Return `PROBE.NAME` of the network; None if it was not measured, or is not finite."""
        return _number(self.measurements, name)

    def theirs(self, name: str) -> Scalar | None:
        """Return the same number of the reference network; None also if the two were measured differently."""
        probe = name.partition(".")[0]
        ours, theirs = usable(self.measurements.get(probe)), usable(self.reference.get(probe))
        if ours is None or theirs is None or not _alike(ours, theirs):
            return None
        return _number(self.reference, name)

    def units(self, probe: str, value: str) -> dict[str, Scalar]:
        """Return one value of each unit that has it, by unit."""
        measurement = usable(self.measurements.get(probe))
        rows = [] if measurement is None else measurement.units
        return {row.name: row.values[value] for row in rows if value in row.values and _finite(row.values[value])}

    def kinds(self, probe: str) -> list[str]:
        """Return the kinds of the units that a probe lists."""
        measurement = usable(self.measurements.get(probe))
        return [] if measurement is None else [row.kind for row in measurement.units]

    def curve(self, kind: str, key: str) -> list[float]:
        """Return a column of the training metrics of one kind of row; NaN for numbers that are not finite."""
        rows = [row for row in self.training if row.get("kind") == kind and key in row]
        return [math.nan if row[key] is None else float(row[key]) for row in rows]

    def has(self, name: str) -> bool:
        """Tell whether a number was measured."""
        if name in TRAINING:
            return bool(self.curve(*TRAINING[name]))
        probe, _, value = name.partition(".")
        return self.number(name) is not None or bool(self.units(probe, value))


def usable(measurement: Measurement | None) -> Measurement | None:
    """Return the measurement if it has a result, that is if the probe applied and did not fail; else None."""
    return measurement if measurement is not None and measurement.status in ("ok", "not_converged") else None


def low(number: Scalar) -> float:
    """Return the lower end of the interval; a number without one counts as exact."""
    return number.value if number.low is None else number.low


def high(number: Scalar) -> float:
    """Return the upper end of the interval."""
    return number.value if number.high is None else number.high


def difference(a: Scalar, b: Scalar) -> Scalar:
    """Return a - b with the interval of two independent numbers.

    If the two are positively correlated, as confidence and correctness of the same images are, the interval is too
    wide, never too narrow.
    """
    down = math.hypot(a.value - low(a), high(b) - b.value)
    up = math.hypot(high(a) - a.value, b.value - low(b))
    value = a.value - b.value
    return Scalar(value=value, low=value - down, high=value + up)


def format_number(number: Scalar) -> str:
    """Write a number for a sentence: `0.82 (0.80 to 0.84)`."""
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
    """Tell whether two measurements differ in nothing but the network."""
    return ours.terms == theirs.terms


Severity = Literal["problem", "notice"]


@dataclass(frozen=True)
class Verdict:
    """The answer of a rule that has something to say."""

    severity: Severity
    statement: str
    numbers: Mapping[str, Scalar]
    against_reference: bool = False
    """Whether it rests on the comparison with the reference network."""
    suggestions: tuple[Suggestion, ...] = ()
    """Those that depend on the network; they come before the rule's own."""


@dataclass(frozen=True)
class Rule:
    """A pure function of the evidence, with what it is about."""

    name: str
    title: str
    needs: tuple[tuple[str, ...], ...]
    """The numbers it looks at, by PROBE.NAME: all of a group, any of the groups."""
    threshold: str
    """The comparison, in words."""
    source: str
    """Where the threshold comes from."""
    basis: Basis
    reference: str | None
    """How it compares with a reference network, if it does."""
    suggestions: tuple[Suggestion, ...]
    judge: Callable[[Evidence], Verdict | None] = field(repr=False)
    applies: Callable[[Evidence], bool] = field(repr=False)

    def looks(self, evidence: Evidence) -> bool:
        """Tell whether the rule can judge: its numbers were measured, and mean something for such a network."""
        return any(all(map(evidence.has, group)) for group in self.needs) and self.applies(evidence)

    def __call__(self, evidence: Evidence) -> Finding | None:
        """Return the finding, or None if there is nothing to say."""
        verdict = self.judge(evidence) if self.looks(evidence) else None
        if verdict is None:
            return None
        compared = verdict.against_reference and self.reference is not None
        own = f"{self.threshold}: {self.source}"
        lines = [f"{self.reference}"] if compared else [own]
        if compared and verdict.severity == "problem":  # worse than the reference alone is a notice
            lines.insert(0, own)
        return Finding(
            rule=self.name,
            title=self.title,
            severity=verdict.severity,
            statement=verdict.statement,
            numbers=dict(verdict.numbers),
            threshold=f"{'; and '.join(lines)}.",
            basis="reference network" if compared else self.basis,
            suggestions=verdict.suggestions + self.suggestions,
        )


_REGISTRY: dict[str, Rule] = {}


def rule(
    title: str,
    *needs: tuple[str, ...],
    threshold: str,
    source: str,
    basis: Basis,
    reference: str | None = None,
    suggestions: tuple[Suggestion, ...] = (),
    applies: Callable[[Evidence], bool] = lambda evidence: True,
) -> Callable[[Callable[[Evidence], Verdict | None]], Rule]:
    """Make a function a rule, known by the function's name; use it as a decorator.

    Args:
        title: What the finding is called.
        needs: The numbers that it looks at, by PROBE.NAME: all of a group, any of the groups.
        threshold: The comparison, in words.
        source: Where the threshold comes from.
        basis: `"published range"`, `"reference network"` or `"heuristic"`.
        reference: How it compares with a reference network, in words, if it does.
        suggestions: What to try.
        applies: Whether the numbers mean something for such a network.
    """

    def register(judge: Callable[[Evidence], Verdict | None]) -> Rule:
        made = Rule(judge.__name__, title, needs, threshold, source, basis, reference, suggestions, judge, applies)
        return register_rule(made)

    return register


def register_rule(made: Rule) -> Rule:
    """Make a rule known by its name; `rule` does it for a function."""
    if not isinstance(made, Rule):
        raise TypeError(f"{made!r} is not a Rule: decorate its function with vitclinic.exam.rule")
    _REGISTRY[made.name] = made
    return made


def known_rules() -> dict[str, Rule]:
    """Return all rules by name, in the order of their findings: ours, then those of installed packages."""
    load_entry_points(ENTRY_POINTS, register_rule)
    return dict(_REGISTRY)


@dataclass(frozen=True)
class Excess:
    """A number beyond its limits, or beyond the reference network's."""

    severity: Severity
    worse: bool
    """Than the reference network."""
    tail: str
    """The end of a sentence: what the reference network has."""


def compare(
    ours: Scalar,
    theirs: Scalar | None,
    *,
    problem: float,
    notice: float | None = None,
    margin: float,
    factor: float = 1,
) -> Excess | None:
    """Compare a number with its limits and with the reference; None if its interval is not wholly beyond either.

    It is a problem above `problem` and a notice above `notice`, or where it is above the reference network's by
    `factor` and `margin`, interval against interval.
    """
    worse = theirs is not None and low(ours) > factor * high(theirs) + margin
    tail = "" if theirs is None else f"; the reference network has {format_number(theirs)}"
    if low(ours) > problem:
        return Excess("problem", worse, tail)
    if worse or (notice is not None and low(ours) > notice):
        return Excess("notice", worse, tail)
    return None
