"""The record of what became of a probe: its result, why it does not apply, or what it failed of."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from typing import Any

from vitclinic.config import validate
from vitclinic.errors import EmptySplitError, NoAttentionMapError, UnknownStructureError, VitclinicError
from vitclinic.measurement import Measurement, Status, plain_data
from vitclinic.probes.probe import DoesNotApply, Probe, Result
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

_PACKAGES = ("vitclinic", "torch", "timm", "numpy")
_NOT_APPLYING = (DoesNotApply, UnknownStructureError, NoAttentionMapError, EmptySplitError)
"""What says that a probe has no meaning here; any other error is a failure."""


def recorded(probe: Probe, subject: Subject, outcome: Result | Exception, duration: float) -> Measurement:
    """The measurement; a result that cannot be recorded is a failure too."""
    subject = seen_by(probe, subject)
    try:
        return _record(probe, subject, outcome, duration)
    except Exception as error:  # a probe may return anything
        log.info("the result of %s cannot be recorded", probe.name, exc_info=error)
        return _record(probe, subject, error, duration)


def seen_by(probe: Probe, subject: Subject) -> Subject:
    """What a probe looks at; the subject itself if the probe cannot see what it wants, and so fails."""
    try:
        return probe.view(subject)
    except Exception as error:  # a probe may raise anything
        log.info("%s cannot see %s", probe.name, subject.name, exc_info=error)
        return subject


def stated_conditions(probe: Probe, subject: Subject) -> dict[str, Any]:
    """What else than subject, data, options and seed the result depends on, as a record holds it."""
    conditions: dict[str, Any] = plain_data(probe.conditions(subject), "conditions")
    return conditions


def conditions_of(probe: Probe, subject: Subject) -> dict[str, Any]:
    """The stated conditions or, of a probe that cannot state them and so fails, the reason."""
    try:
        return stated_conditions(probe, subject)
    except Exception as error:  # a probe may raise anything
        log.info("%s does not say what it depends on", probe.name, exc_info=error)
        return {"unknown": _status(error)[1]}


def _record(probe: Probe, subject: Subject, outcome: Result | Exception, duration: float) -> Measurement:
    if not isinstance(outcome, Result | Exception):
        raise TypeError(f"the probe gives {type(outcome).__name__}; expected a Result")
    result = outcome if isinstance(outcome, Result) else Result()
    status, reason = (result.status, result.reason) if isinstance(outcome, Result) else _status(outcome)
    record = {
        "probe": probe.name,
        "revision": probe.revision,
        "config": probe.model_dump(mode="json"),
        "subject": subject.digest,
        "data": subject.data_digest,
        "conditions": conditions_of(probe, subject),
        "status": status,
        "reason": reason,
        "scalars": dict(result.scalars),
        "units": list(result.units),
        "arrays": dict(result.arrays),
        "provenance": {
            "seed": subject.seed,
            "mode": result.mode,
            "device": str(subject.device),
            "batch_size": subject.batch_size,
            "duration": duration,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "images": len(subject),
        },
    }
    return validate(Measurement, record)


def _status(error: Exception) -> tuple[Status, str]:
    if isinstance(error, _NOT_APPLYING):
        return "does_not_apply", str(error)
    text = " ".join(str(error).split())
    return "failed", text if isinstance(error, VitclinicError) and text else f"{type(error).__name__}: {text}"
