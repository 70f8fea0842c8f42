"""What an exam does, step by step, and how its time is shared out when estimates prove wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vitclinic._core.config import validate
from vitclinic.exam.planner import given_options
from vitclinic.probes import Probe, StreamingProbe, Subject


@dataclass(frozen=True)
class Step:
    """One thing to do: a pass that streaming probes share, or one other probe, on one of the subjects."""

    place: int
    """Of the subject among all."""
    subject: Subject
    probes: Sequence[Probe]
    seconds: float
    """What it will take, estimated; NaN if unknown."""
    limit: int | None = None
    """Images of a pass."""

    @property
    def label(self) -> str:
        """The probe's name, or that it is a pass of several."""
        if not isinstance(self.probes[0], StreamingProbe):
            return self.probes[0].name
        return "shared pass" if self.limit is None else f"shared pass of {self.limit}"

    @property
    def is_cuttable(self) -> bool:
        """Tell whether the probe can be told how long it may take, and the user has not said so."""
        probe = self.probes[0]
        return "budget" in type(probe).model_fields and "budget" not in probe.model_fields_set

    def cut_to(self, seconds: float) -> Step:
        """Return the same step with so much time and no more."""
        probe = self.probes[0]
        cut = validate(type(probe), {**given_options(probe), "budget": max(1, round(seconds, 1))})
        return Step(self.place, self.subject, [cut], seconds, self.limit)


@dataclass(frozen=True)
class Schedule:
    """All steps, in order, and what will not be done."""

    subjects: Sequence[Subject]
    steps: Sequence[Step]
    stored: Sequence[Sequence[str]]
    """Of each subject, the probes whose measurements are there already."""
    budget: float | None = None
    left_out: Mapping[str, float] = field(default_factory=dict)
    """Probes that do not fit into the budget, with the seconds that the cheapest form of each would take."""

    @property
    def seconds(self) -> float:
        """What all steps take, estimated; NaN if that of any is unknown."""
        return sum(step.seconds for step in self.steps)


class TimeBudget:
    """Shares an exam's time out among its steps, so that what was planned is measured.

    Estimates are corrected by what finished steps took. A step that can be cut gets its corrected estimate, and its
    share of what the others leave; if it is cut, it goes on last, with what is left by then. Steps that cannot be cut
    are taken as long as the exam is not far beyond its budget: a plan's word counts more than its last seconds.
    """

    OVERTIME = 1.5
    """Beyond so many times the budget, nothing more is begun."""
    LEAST = 2.0
    """Seconds that a step which can be cut gets at least."""

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.started = time.monotonic()
        self._estimated = self._taken = 0.0

    def note(self, step: Step, seconds: float) -> None:
        """Learn from a step that was done, and not cut."""
        if math.isfinite(step.seconds) and step.seconds > 0:
            self._estimated += step.seconds
            self._taken += seconds

    @property
    def correction(self) -> float:
        """What steps took so far, relative to their estimates."""
        if not self._estimated:
            return 1.0
        return min(8.0, max(0.25, self._taken / self._estimated))

    @property
    def left(self) -> float:
        """Seconds until the budget ends; negative after that."""
        return math.inf if self.budget is None else self.started + self.budget - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Tell whether nothing more is to be begun."""
        return self.budget is not None and self.left <= -(self.OVERTIME - 1) * self.budget

    def allow(self, step: Step, rest: Iterable[Step]) -> float | None:
        """Return the seconds that a step may take, the `rest` still being to do; None: whatever it takes.

        Example:
            With 60 s left, a step estimated at 10 s, and 20 s of other work of which half can be cut: the 30 s that
            nobody claims are divided in the ratio of the estimates, and the step gets 10 + 15 = 25 s.
        """
        if self.budget is None or not step.is_cuttable:
            return None
        own = self._expected(step)
        others = [(self._expected(other), other.is_cuttable) for other in rest]
        slack = self.left - own - sum(seconds for seconds, _ in others)
        claims = own + sum(seconds for seconds, cuttable in others if cuttable)
        share = slack * own / claims if claims > 0 else slack / (1 + sum(cuttable for _, cuttable in others))
        return max(self.LEAST, own + share)

    def _expected(self, step: Step) -> float:
        return self.correction * step.seconds if math.isfinite(step.seconds) else 0.0
