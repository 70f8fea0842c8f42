"""What a rule is: what it looks at, what it compares that with and whose comparison it is, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vitclinic.clinic.findings.evidence import Evidence, high, low, shown
from vitclinic.finding import Basis, Finding, Suggestion
from vitclinic.measurement import Scalar

Severity = Literal["problem", "notice"]


@dataclass(frozen=True)
class Verdict:
    """What a rule's function says where it has something to say."""

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
        """Whether it can say anything: its numbers are there, and mean something for such a network."""
        return any(all(map(evidence.has, group)) for group in self.needs) and self.applies(evidence)

    def __call__(self, evidence: Evidence) -> Finding | None:
        """The finding, or None where there is nothing to say."""
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
    """Decorator: make a function a rule, known by the function's name."""

    def registered(judge: Callable[[Evidence], Verdict | None]) -> Rule:
        made = Rule(judge.__name__, title, needs, threshold, source, basis, reference, suggestions, judge, applies)
        _REGISTRY[made.name] = made
        return made

    return registered


def known_rules() -> dict[str, Rule]:
    """All rules by name, in the order in which a report has their findings."""
    return dict(_REGISTRY)


@dataclass(frozen=True)
class Comparison:
    """A number beyond its limits, or beyond the reference network's."""

    severity: Severity
    worse: bool
    """Than the reference network."""
    tail: str
    """The end of a sentence: what the reference network has."""


def compared(
    ours: Scalar,
    theirs: Scalar | None,
    *,
    problem: float,
    notice: float | None = None,
    margin: float,
    factor: float = 1,
) -> Comparison | None:
    """Whether a number is too large, its whole interval being so; None if it is not.

    It is a problem above `problem` and a notice above `notice`, or where it is above the reference network's by
    `factor` and `margin`, interval against interval.
    """
    worse = theirs is not None and low(ours) > factor * high(theirs) + margin
    tail = "" if theirs is None else f"; the reference network has {shown(theirs)}"
    if low(ours) > problem:
        return Comparison("problem", worse, tail)
    if worse or (notice is not None and low(ours) > notice):
        return Comparison("notice", worse, tail)
    return None
