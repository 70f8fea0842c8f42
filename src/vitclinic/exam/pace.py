"""How long measuring will take, estimated from a few images that are timed beforehand."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from vitclinic._core.distributed import ALONE
from vitclinic._core.time import seconds as in_seconds
from vitclinic.probes.memory import halving
from vitclinic.probes.probe import Probe, StreamingProbe
from vitclinic.probes.restoring import preserve_state
from vitclinic.probes.running import find_obstacle
from vitclinic.probes.shared_pass import run_shared_pass
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

_TRIAL = 16
"""How many images are timed before measuring."""
_QUICK = 0.2
"""Where a whole batch takes so many seconds at most, it is timed: an image among many costs a small network less."""


class Pace:
    """How fast one subject is measured. Each timing is made once, when it is first needed.

    A network that fails while it is timed takes NaN seconds; its probes will fail for the same reason.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._passes: dict[tuple[str, ...], float] = {}

    @cached_property
    def forward(self) -> float:
        """Seconds of an image in a forward pass."""
        return self._run_timing(self.subject, self.subject.seconds_per_image)

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


def _seconds_of_a_pass(subject: Subject, probes: dict[str, StreamingProbe]) -> float:
    """Return the seconds per image of a pass with these probes, after a warm-up pass."""
    told, subject.progress = subject.progress, lambda what, done, total: None
    try:
        with preserve_state(subject.network, subject.seed):
            run_shared_pass(subject, probes)
            started = time.perf_counter()
            run_shared_pass(subject, probes)
            return (time.perf_counter() - started) / len(subject)
    finally:
        subject.progress = told


def estimate_seconds(subject: Subject, probes: Sequence[Probe]) -> float:
    """Return how long measuring will take: the shared pass and each probe's own work; NaN if it cannot be timed."""
    pace = Pace(subject)
    return pace.of_shared_pass(probes, len(subject)) + sum(pace.of(probe) for probe in probes)


def _most_seconds(probe: Probe) -> float:
    """Return the budget of a probe that has one."""
    budget = getattr(probe, "budget", None)
    return math.inf if budget is None else in_seconds(budget)
