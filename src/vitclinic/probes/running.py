"""Probes on a subject: the shared pass, the passes of each, and what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vitclinic.measurement import Measurement
from vitclinic.probes.applying import obstacle_to
from vitclinic.probes.memory import halving
from vitclinic.probes.probe import OwningProbe, Probe, StreamingProbe
from vitclinic.probes.records import recorded
from vitclinic.probes.restoring import left_as_it_was
from vitclinic.probes.sharing import Outcome, shared_pass
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)


def measure(
    subject: Subject, probes: Sequence[Probe], done: Callable[[Measurement], None] = lambda measurement: None
) -> list[Measurement]:
    """One measurement a probe, in their order; `done` is called with each as soon as there is one.

    The network is left exactly as it was. A probe that fails is a measurement that says so.
    """
    measurements: dict[str, Measurement] = {}
    batch_size = subject.batch_size
    for probe, outcome, seconds in _outcomes(subject, probes):
        measurements[probe.name] = recorded(probe, subject, outcome, seconds)
        done(measurements[probe.name])
    subject.batch_size = batch_size
    return [measurements[probe.name] for probe in probes]


def _outcomes(subject: Subject, probes: Sequence[Probe]) -> Iterator[tuple[Probe, Outcome, float]]:
    """Each probe with what became of it and the seconds it took, the quick ones first."""
    batch_size = subject.batch_size
    streaming: dict[str, StreamingProbe] = {}
    owning: list[OwningProbe] = []
    for probe in probes:
        obstacle = obstacle_to(probe, subject)
        if obstacle is not None:
            yield probe, obstacle, 0.0
        elif isinstance(probe, StreamingProbe):
            streaming[probe.name] = probe
        elif isinstance(probe, OwningProbe):
            owning.append(probe)
    if streaming:
        started = time.perf_counter()
        outcomes = _streamed(subject, streaming)
        seconds = time.perf_counter() - started
        yield from ((streaming[name], outcome, seconds) for name, outcome in outcomes.items())
    for probe in owning:
        view = probe.view(subject)
        view.batch_size = batch_size
        started = time.perf_counter()
        outcomes = _attempted(view, [probe.name], partial(_measured, view, probe))
        yield probe, outcomes[probe.name], time.perf_counter() - started


def _streamed(subject: Subject, probes: dict[str, StreamingProbe]) -> dict[str, Outcome]:
    """The outcomes of the shared pass; if that fails as a whole, of a pass for each, so that the culprit bears it."""
    outcomes = _attempted(subject, probes, lambda: shared_pass(subject, probes))
    failed_as_a_whole = len(probes) > 1 and len(set(map(id, outcomes.values()))) == 1
    if not failed_as_a_whole:
        return outcomes
    return {name: _streamed(subject, {name: probe})[name] for name, probe in probes.items()}


def _measured(subject: Subject, probe: OwningProbe) -> dict[str, Outcome]:
    return {probe.name: probe.measure(subject)}


def _attempted(subject: Subject, names: Iterable[str], attempt: Callable[[], dict[str, Outcome]]) -> dict[str, Outcome]:
    """The outcomes of `attempt`, or its failure as the outcome of each; the network is restored after every try."""

    def restored() -> dict[str, Outcome]:
        with left_as_it_was(subject.network, subject.seed):
            return subject.processes.agreed(attempt)  # also for want of memory: all start over with half the batch

    what = f"{subject.name}, {' and '.join(names)}"
    try:
        return halving(subject, what, restored)
    except Exception as error:  # a failing probe is a result; the others go on
        log.info("%s failed", what, exc_info=error)
        return dict.fromkeys(names, error)
