"""Where measurements are kept, and finding one that has been made already.

A run directory keeps those of its network in `exams/`; those of other networks are in `exams/NAME-DIGEST/` of the
current directory, or wherever the user says. A file is named after its probe and the digest of what the result
depends on: network, data, options (without those at their defaults), seed, the probe's revision and conditions. How
long a probe may take (`budget`) is no part of that: it says how far a result goes, not what it is.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

from vitclinic._core.errors import RunError
from vitclinic._core.hashing import fingerprint
from vitclinic._core.records import SCHEMA, Measurement
from vitclinic._core.time import seconds
from vitclinic.probes import Probe, Subject, conditions_of, known_probes, seen_by
from vitclinic.training import Run

log = logging.getLogger(__name__)

REUSED = ("ok", "not_converged")
"""Statuses that the same network, data and options would end in again; other measurements are made anew."""


def read_measurement(path: Path) -> Measurement:
    """Read a stored measurement; one of vitclinic 0.1 gets the facts of the probe that has its name today.

    Args:
        path: The `.json` file; its arrays lie beside it.

    Raises:
        RunError: Where the file is damaged, or not a measurement.
    """
    stored = Measurement.read(path)
    probe = known_probes().get(stored.probe) if stored.facts is None else None
    return stored if probe is None else stored.model_copy(update={"facts": probe.facts()})


class Store:
    """A folder of measurements."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, subject: Subject, run: Run | None, out: Path | None) -> Store:
        """The store of a subject, which is that of its run if it has one."""
        if run is not None and out is None:
            return cls(run.path / "exams")
        short = re.sub(r"@.*/", "@", subject.name)  # of a file of weights, its name
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-.")[:80] or "network"
        return cls((out or Path("exams")) / f"{name}-{subject.digest[:8]}")

    def path(self, probe: Probe, subject: Subject) -> Path:
        """Where the measurement of `subject` by `probe` is, or will be."""
        subject = seen_by(probe, subject)
        options = probe.model_dump(mode="json", exclude_defaults=True, exclude={"budget"})
        identity = [probe.revision, options, conditions_of(probe, subject), subject.seed]
        key = fingerprint(SCHEMA, probe.name, subject.digest, subject.data_digest, *identity)
        return self.folder / f"{probe.name}-{key[:12]}.json"

    def find(self, probe: Probe, subject: Subject) -> Measurement | None:
        """The stored measurement, if it can be reused; a damaged one is made anew, with a message."""
        path = self.path(probe, subject)
        if not path.is_file():
            return None
        try:
            stored = read_measurement(path)
        except RunError as error:
            log.warning("%s It is measured anew.", error)
            return None
        # The batch may have been halved since the path was named, and the result be another's.
        same = stored.conditions == conditions_of(probe, subject)
        return stored if same and stored.status in REUSED and _far_enough(stored, probe) else None


def is_final(measurement: Measurement) -> bool:
    """Whether more time would not change it: then its unfinished work is of no more use."""
    return measurement.status == "ok" or (measurement.status == "not_converged" and _allowed(measurement) == math.inf)


def _far_enough(stored: Measurement, probe: Probe) -> bool:
    """Whether it has come to its end, or had as long as `probe` may take."""
    wanted = getattr(probe, "budget", None)
    return is_final(stored) or _allowed(stored) >= (math.inf if wanted is None else seconds(wanted))


def _allowed(measurement: Measurement) -> float:
    budget = measurement.config.get("budget")
    return math.inf if budget is None else seconds(budget)
