"""Stores of a subject's measurements and their pictures, and how one that exists is found again.

A run directory keeps those of its network in `exams/`; those of other networks are in `exams/NAME-DIGEST/` of the
current directory, or wherever the user says. A file is named after its probe and the digest of what the result
depends on: network, data, options (without those at their defaults), seed, the probe's revision and conditions. How
long a probe may take (`budget`) is no part of that: it says how far a result goes, not what it is. Pictures are PNG
files in a folder beside their measurement: `PROBE-KEY/NAME.png`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import RunError
from vitclinic._core.images import png
from vitclinic._core.io import fingerprint, write_bytes, write_errors
from vitclinic._core.records import SCHEMA, Measurement
from vitclinic._core.time import seconds
from vitclinic.probes import Probe, StreamingProbe, Subject, describe_conditions, known_probes, view_of

log = logging.getLogger(__name__)

REUSED = ("ok", "not_converged")
"""Statuses that the same network, data and options would end in again; other measurements are made again."""


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
    """The measurements of one subject on disk.

    A `limit` is the number of images that a plan has chosen for a streaming probe; other probes choose their own.
    """

    def __init__(self, subject: Subject, out: Path | None = None) -> None:
        self.subject = subject
        self.folder = _folder(subject, out)

    def view(self, probe: Probe, limit: int | None = None) -> Subject:
        """Return what a probe is given: the subject, with at most `limit` images for a streaming probe."""
        if limit is None or not isinstance(probe, StreamingProbe):
            return self.subject
        return self.subject.on(self.subject.split, limit)

    def path(self, probe: Probe, limit: int | None = None) -> Path:
        """Return where the measurement by `probe` is, or will be."""
        subject = view_of(probe, self.view(probe, limit))
        options = probe.model_dump(mode="json", exclude_defaults=True, exclude={"budget"})
        identity = [probe.revision, options, describe_conditions(probe, subject), subject.seed]
        key = fingerprint(SCHEMA, probe.name, subject.digest, subject.data_digest, *identity)
        return self.folder / f"{probe.name}-{key[:12]}.json"

    def has(self, probe: Probe, limit: int | None = None) -> bool:
        """Tell whether something is stored, of whatever status."""
        return self.path(probe, limit).is_file()

    def find(self, probe: Probe, limit: int | None = None, *, however_short: bool = False) -> Measurement | None:
        """Return the stored measurement, if it can be reused; a damaged one is made again, with a message.

        One that was cut for want of time is reused by a probe that has no more, or `however_short` its time was.
        """
        path = self.path(probe, limit)
        if not path.is_file():
            return None
        try:
            stored = read_measurement(path)
        except RunError as error:
            log.warning("%s It is measured again.", error)
            return None
        # The batch may have been halved since the path was named, and the result be another's.
        same = stored.conditions == describe_conditions(probe, view_of(probe, self.view(probe, limit)))
        usable = same and stored.status in REUSED
        return stored if usable and (however_short or _is_far_enough(stored, probe)) else None

    def write(self, measurement: Measurement, path: Path) -> None:
        """Store a measurement. Unfinished work stays where it helps: after a failure, or if time had run out."""
        measurement.write(path)
        if is_final(measurement):
            partial_path(path).unlink(missing_ok=True)


class ExamRecord:
    """Measurements of one subject in the course of an exam: stored, made and left out."""

    def __init__(self, subject: Subject, out: Path | None) -> None:
        self.subject, self.store = subject, Store(subject, out)
        self.probes: list[Probe] = []
        self.limits: Mapping[str, int | None] = {}
        self.files: dict[str, Path] = {}
        self.found: dict[str, Measurement] = {}
        self.made: dict[str, Measurement] = {}
        self.skipped: dict[str, str] = {}

    def expect(self, probes: Sequence[Probe], limits: Mapping[str, int | None]) -> None:
        """Note what is to be measured, a streaming probe on at most so many images, and where it goes."""
        self.probes = list(probes)
        self.limits = limits
        self.files = {probe.name: self.store.path(probe, self.limits[probe.name]) for probe in probes}
        self.subject.scratch.update({name: partial_path(path) for name, path in self.files.items()})

    def read(self, fresh: bool, repeated: bool) -> dict[str, Measurement]:
        """Return what is stored and may be reused: if nothing may, unfinished work goes, too."""
        if fresh:
            for path in self.subject.scratch.values():
                path.unlink(missing_ok=True)
            return {}
        stored = {
            probe.name: self.store.find(probe, self.limits[probe.name], however_short=repeated) for probe in self.probes
        }
        return {name: measurement for name, measurement in stored.items() if measurement is not None}

    def write(self, measurement: Measurement) -> None:
        """Store a measurement."""
        self.store.write(measurement, self.files[measurement.probe])

    @property
    def missing(self) -> list[Probe]:
        """The probes whose measurements are not stored."""
        return [probe for probe in self.probes if probe.name not in self.found]


def partial_path(path: Path) -> Path:
    """Return where the unfinished work of the measurement at `path` lies."""
    return path.with_suffix(".partial")


def is_final(measurement: Measurement) -> bool:
    """Tell whether more time would not change it: then its unfinished work is of no more use."""
    return measurement.status == "ok" or (
        measurement.status == "not_converged" and _time_allowed(measurement) == math.inf
    )


def _folder(subject: Subject, out: Path | None) -> Path:
    if subject.run is not None and out is None:
        return Path(subject.run.path) / "exams"
    short = re.sub(r"@.*/", "@", subject.name)  # of a file of weights, its name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-.")[:80] or "network"
    return (out or Path("exams")) / f"{name}-{subject.digest[:8]}"


def _is_far_enough(stored: Measurement, probe: Probe) -> bool:
    """Tell whether it has come to its end, or had as long as `probe` may take."""
    wanted = getattr(probe, "budget", None)
    return is_final(stored) or _time_allowed(stored) >= (math.inf if wanted is None else seconds(wanted))


def _time_allowed(measurement: Measurement) -> float:
    budget = measurement.config.get("budget")
    return math.inf if budget is None else seconds(budget)


def draw(probe: Probe, measurement: Measurement, file: Path, anew: bool) -> Path | None:
    """Write the pictures of a measurement that is stored as `file`, and return their folder, None if there are none.

    Unless they are to be drawn `anew`, pictures that are there already are left. A probe that cannot draw is a message:
    its numbers are stored.
    """
    if measurement.status not in ("ok", "not_converged"):
        return None
    try:
        pictures = dict(probe.pictures(measurement))
    except Exception as error:  # a probe may raise anything
        log.info("%s cannot draw", probe.name, exc_info=error)
        log.warning("There are no pictures of %s: %s: %s", probe.name, type(error).__name__, error)
        return None
    if not pictures:
        return None
    folder = file.with_suffix("")
    write_pictures(folder, pictures, anew)
    return folder


def write_pictures(folder: Path, pictures: Mapping[str, NDArray[np.uint8]], anew: bool = True) -> list[Path]:
    """Write each picture [H, W, 3] as a PNG named after it; characters that are not for file names become hyphens."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in pictures.items():
        files.append(folder / f"{_file_name(name)}.png")
        if anew or not files[-1].exists():
            write_bytes(files[-1], png(picture))
    return files


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "picture"
