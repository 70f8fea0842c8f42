"""Time in an exam: how long each step will take, and how the time is shared out when such estimates prove wrong."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import torch

from vitclinic._core.config import validate
from vitclinic._core.distributed import ALONE
from vitclinic._core.time import seconds as in_seconds
from vitclinic.exam.request import given_options
from vitclinic.probes import Probe, StreamingProbe, Subject
from vitclinic.probes.guards import halving, preserve_state
from vitclinic.probes.running import find_obstacle
from vitclinic.probes.shared_pass import run_shared_pass

log = logging.getLogger(__name__)

_TRIAL = 16
"""How many images are timed before measuring."""
_QUICK = 0.2
"""Where a whole batch takes so many seconds at most, it is timed: an image among many costs a small network less."""


class Pace:
    """The speed at which one subject is measured. Each timing is made once, when it is first needed.

    A network that fails while it is timed takes NaN seconds; its probes will fail for the same reason.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._passes: dict[tuple[str, ...], float] = {}

    @cached_property
    def forward(self) -> float:
        """Seconds of an image in a forward pass."""
        return self._run_timing(self.subject, lambda: _seconds_of_an_image(self.subject))

    def of(self, probe: Probe) -> float:
        """Return the seconds of a probe's own work, at most its own budget; 0 if it does not apply."""
        if find_obstacle(probe, self.subject) is not None:
            return 0.0
        forwards = probe.forwards(probe.view(self.subject))
        return min(self.forward * forwards, _most_seconds(probe)) if forwards else 0.0

    def of_shared_pass(self, probes: Iterable[Probe], images: int) -> float:
        """Return the seconds of a pass over so many images, shared by those of the probes that stream and apply."""
        streaming = {
            probe.name: probe
            for probe in probes
            if isinstance(probe, StreamingProbe) and find_obstacle(probe, self.subject) is None
        }
        if not streaming or math.isnan(self.forward):
            return self.forward * images if streaming else 0.0
        if tuple(streaming) not in self._passes:
            few = self.subject.on(self.subject.split, self._trial_images)
            self._passes[tuple(streaming)] = self._run_timing(few, lambda: _seconds_of_a_pass(few, streaming))
        return self._passes[tuple(streaming)] * images

    @property
    def _trial_images(self) -> int:
        size = self.subject.batch_size
        return size if self.forward * size <= _QUICK else min(_TRIAL, size)

    def _run_timing(self, subject: Subject, timing: Callable[[], float]) -> float:
        """Run `timing()` on a few images and, if that is quick, on a whole batch."""
        size, subject.batch_size = subject.batch_size, min(_TRIAL, subject.batch_size)
        distributed, subject.distributed = subject.distributed, ALONE
        try:
            seconds = halving(subject, f"{subject.name}, a trial", timing)
            if seconds * size <= _QUICK and subject.batch_size < size:
                subject.batch_size = size
                seconds = halving(subject, f"{subject.name}, a trial", timing)
        except Exception as error:  # the network may raise anything
            log.info("%s cannot be timed", subject.name, exc_info=error)
            return math.nan
        finally:
            subject.batch_size, subject.distributed = size, distributed
        return seconds


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of a call; of a quick one the median of three, since others on the machine slow some."""
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) <= _QUICK:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def _seconds_of_an_image(subject: Subject) -> float:
    """Return the time of a forward pass per image, measured on one batch after a warm-up."""
    images = next(subject.batches()).images
    with preserve_state(subject.network, subject.seed), torch.no_grad():

        def call() -> None:
            subject.logits(images)
            if subject.device.type == "cuda":
                torch.cuda.synchronize(subject.device)

        call()
        return _time(call) / len(images)


def _seconds_of_a_pass(subject: Subject, probes: dict[str, StreamingProbe]) -> float:
    """Return the seconds per image of a pass with these probes, after a warm-up pass."""
    told, subject.progress = subject.progress, lambda what, done, total: None
    try:
        with preserve_state(subject.network, subject.seed):
            run_shared_pass(subject, probes)
            return _time(lambda: run_shared_pass(subject, probes)) / len(subject)
    finally:
        subject.progress = told


def _most_seconds(probe: Probe) -> float:
    """Return the budget of a probe that has one."""
    budget = getattr(probe, "budget", None)
    return math.inf if budget is None else in_seconds(budget)


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
    memory: int | None = None
    """Bytes that it will hold at its peak, beside network and data; None if unknown."""
    batch_size: int | None = None
    """Images at a time, if those of the exam would need more memory than is free."""

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
        return replace(self, probes=[cut], seconds=seconds)


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
    def memory(self) -> int | None:
        """The largest estimate of the steps, in bytes; None if none is known."""
        return max((step.memory for step in self.steps if step.memory is not None), default=None)

    @property
    def seconds(self) -> float:
        """The estimated time of all steps; NaN if that of any is unknown."""
        return sum(step.seconds for step in self.steps)


def _bound(correction: float) -> float:
    """Return a correction of estimates that one odd step does not throw off."""
    return min(8.0, max(0.25, correction))


class TimeBudget:
    """Shares an exam's time out among its steps, so that what was planned is measured.

    Estimates are corrected by what finished steps took: those of the same probe on another subject if there are such,
    else all. A step that can be cut gets its corrected estimate, and its share of what the others leave; if it is cut,
    it goes on last. Steps that cannot be cut, and what was cut, are taken as long as the exam is not far beyond its
    budget: a plan's word counts more than its last seconds.
    """

    OVERTIME = 1.5
    """Beyond so many times the budget, nothing more is begun."""
    LEAST = 2.0
    """Seconds that a step which can be cut gets at least."""

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.started = time.monotonic()
        self._estimated = self._taken = 0.0
        self._own: dict[str, float] = {}
        """The time that a step took, relative to its estimate, by its label."""

    def note(self, step: Step, seconds: float) -> None:
        """Learn from a step that was done, and not cut."""
        if math.isfinite(step.seconds) and step.seconds > 0:
            self._estimated += step.seconds
            self._taken += seconds
            self._own[step.label] = _bound(seconds / step.seconds)

    @property
    def correction(self) -> float:
        """The time that steps took so far, relative to their estimates."""
        if not self._estimated:
            return 1.0
        return _bound(self._taken / self._estimated)

    @property
    def left(self) -> float:
        """Seconds until the budget ends; negative after that."""
        return math.inf if self.budget is None else self.started + self.budget - time.monotonic()

    @property
    def left_at_most(self) -> float:
        """Seconds until nothing more is done, which is somewhat after the budget has ended."""
        return math.inf if self.budget is None else self.left + (self.OVERTIME - 1) * self.budget

    @property
    def is_over(self) -> bool:
        """Tell whether nothing more is to be begun."""
        return self.left_at_most <= 0

    def resume(self, step: Step, rest: Iterable[Step]) -> float:
        """Return the seconds that a step may take which was cut, the `rest` of those still being to do.

        The time is divided in the ratio of the estimates: networks differ in what the same probe takes.
        """
        own, others = step.seconds, [other.seconds for other in rest]
        claims = own + sum(others)
        known = math.isfinite(claims) and claims > 0
        return self.left_at_most * (own / claims if known else 1 / (1 + len(others)))

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
        correction = self._own.get(step.label, self.correction)
        return correction * step.seconds if math.isfinite(step.seconds) else 0.0
