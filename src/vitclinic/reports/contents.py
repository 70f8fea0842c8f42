"""What a report is made of: networks, as far as they have been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitclinic.finding import Finding
from vitclinic.measurement import Measurement


@dataclass(frozen=True)
class Examined:
    """One network as a report shows it."""

    name: str
    """As the user wrote it; anything may stand here, and is escaped where it is shown."""
    measurements: Mapping[str, Measurement]
    """By probe."""
    findings: Sequence[Finding] = ()
    training: Sequence[Mapping[str, Any]] = ()
    """The rows of a run's metrics.jsonl: kind, step, epoch, loss, ..."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else is known, in its order, for the head of the page: data, recipe, treatments, parameters."""
