"""Probes on a subject: which apply, the measuring, and the records of it."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vitclinic.errors import AnatomyError, VitclinicError
from vitclinic.measurement import Measurement, Provenance, Status
from vitclinic.probes.memory import halving
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Probe, Result, StreamingProbe
from vitclinic.probes.restoring import left_as_it_was
from vitclinic.probes.sharing import Outcome, shared_pass
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

_PACKAGES = ("vitclinic", "torch", "timm", "numpy")

_TRIAL = 16
"""How many images are timed before measuring."""


def measure(
    subject: Subject, probes: Sequence[Probe], done: Callable[[Measurement], None] = lambda measurement: None
) -> list[Measurement]:
    """One measurement a probe, in their order; `done` is called with each as soon as there is one.

    The network is left exactly as it was. A probe that fails is a measurement that says so.
    """
    measurements: dict[str, Measurement] = {}
    batch_size = subject.batch_size
    for probe, outcome, seconds in _outcomes(subject, probes):
        measurements[probe.name] = _recorded(probe, subject, outcome, seconds)
        done(measurements[probe.name])
    subject.batch_size = batch_size
    return [measurements[probe.name] for probe in probes]


def _outcomes(subject: Subject, probes: Sequence[Probe]) -> Iterator[tuple[Probe, Outcome, float]]:
    """Each probe with what became of it and the seconds it took, the quick ones first."""
    batch_size = subject.batch_size
    streaming: dict[str, StreamingProbe] = {}
    owning: list[OwningProbe] = []
    for probe in probes:
        reason = why_not(probe, subject)
        if reason is not None:
            yield probe, DoesNotApply(reason), 0.0
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
        subject.batch_size = batch_size
        started = time.perf_counter()
        outcomes = _attempted(subject, [probe.name], partial(_measured, subject, probe))
        yield probe, outcomes[probe.name], time.perf_counter() - started


def _streamed(subject: Subject, probes: dict[str, StreamingProbe]) -> dict[str, Outcome]:
    """The outcomes of the shared pass; if a tap or a recording fails it, of a pass for each, so that one bears it."""
    outcomes = _attempted(subject, probes, lambda: shared_pass(subject, probes))
    common = set(map(id, outcomes.values()))
    if len(probes) == 1 or len(common) > 1 or not isinstance(next(iter(outcomes.values())), AnatomyError):
        return outcomes
    return {name: _streamed(subject, {name: probe})[name] for name, probe in probes.items()}


def _measured(subject: Subject, probe: OwningProbe) -> dict[str, Outcome]:
    return {probe.name: probe.measure(subject)}


def why_not(probe: Probe, subject: Subject) -> str | None:
    """The reason why `probe` does not apply to `subject`, or None if it does."""
    if "labels" in probe.needs and subject.outputs != len(subject.classes):
        return (
            f"the network tells {subject.outputs} classes apart and the data has {len(subject.classes)}, "
            "so that its labels do not mean the network's outputs."
        )
    if "gradients" in probe.needs and not any(p.is_floating_point() for p in subject.network.parameters()):
        return "the network has no parameters with a gradient."
    if probe.needs & {"anatomy", "attention"}:
        try:
            units = subject.anatomy.units
        except AnatomyError as error:
            return str(error)
        if "attention" in probe.needs and not any(unit.attention for unit in units):
            return f"a {subject.anatomy.family} has no attention maps."
    return None


def estimated_seconds(subject: Subject, probes: Iterable[Probe]) -> float:
    """What measuring will take: the shared pass, and each probe's own work, in forward passes timed beforehand."""
    applicable = [probe for probe in probes if why_not(probe, subject) is None]
    shared = len(subject) if any(isinstance(probe, StreamingProbe) for probe in applicable) else 0
    batch_size, subject.batch_size = subject.batch_size, min(_TRIAL, subject.batch_size)
    try:
        seconds = halving(subject, f"{subject.name}, a trial", lambda: subject.seconds_per_image)
    finally:
        subject.batch_size = batch_size
    return seconds * (shared + sum(probe.forwards(subject) for probe in applicable))


def _attempted(subject: Subject, names: Iterable[str], attempt: Callable[[], dict[str, Outcome]]) -> dict[str, Outcome]:
    """The outcomes of `attempt`, or its failure as the outcome of each; the network is restored after every try."""

    def restored() -> dict[str, Outcome]:
        with left_as_it_was(subject.network, subject.seed):
            return attempt()

    what = f"{subject.name}, {' and '.join(names)}"
    try:
        return halving(subject, what, restored)
    except Exception as error:  # a failing probe is a result; the others go on
        log.info("%s failed", what, exc_info=error)
        return dict.fromkeys(names, error)


def _recorded(probe: Probe, subject: Subject, outcome: Outcome, duration: float) -> Measurement:
    result = outcome if isinstance(outcome, Result) else Result()
    status, reason = (result.status, result.reason) if isinstance(outcome, Result) else _status(outcome)
    return Measurement(
        probe=probe.name,
        revision=probe.revision,
        config=probe.model_dump(mode="json"),
        subject=subject.digest,
        data=subject.data_digest,
        conditions=probe.conditions(subject),
        status=status,
        reason=reason,
        scalars=dict(result.scalars),
        units=list(result.units),
        arrays=dict(result.arrays),
        provenance=Provenance(
            seed=subject.seed,
            mode=result.mode,
            device=str(subject.device),
            batch_size=subject.batch_size,
            duration=duration,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions={name: importlib.metadata.version(name) for name in _PACKAGES},
            images=len(subject),
        ),
    )


def _status(error: Exception) -> tuple[Status, str]:
    if isinstance(error, DoesNotApply | AnatomyError):
        return "does_not_apply", str(error)
    text = " ".join(str(error).split())
    return "failed", text if isinstance(error, VitclinicError) and text else f"{type(error).__name__}: {text}"
