"""One patient in the course of an examination: what is stored, made and left undone of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitclinic.clinic.planning import Patient
from vitclinic.clinic.store import is_final
from vitclinic.measurement import Measurement
from vitclinic.probes import Probe


class Case:
    """`found` is what was stored before, `made` what is measured now, `skipped` why something is not: by probe."""

    def __init__(self, patient: Patient, probes: Sequence[Probe], limit: int | None) -> None:
        self.patient, self.probes, self.limit = patient, probes, limit
        self.files: dict[str, Path] = {probe.name: patient.path(probe, limit) for probe in probes}
        self.found: dict[str, Measurement] = {}
        self.made: dict[str, Measurement] = {}
        self.skipped: dict[str, str] = {}
        patient.subject.scratch.update({name: path.with_suffix(".partial") for name, path in self.files.items()})

    def stored(self, fresh: bool) -> dict[str, Measurement]:
        """What is stored and may be reused: if nothing may, unfinished work goes, too."""
        if fresh:
            for path in self.patient.subject.scratch.values():
                path.unlink(missing_ok=True)
            return {}
        store, limit = self.patient.store, self.limit
        stored = {probe.name: store.find(probe, self.patient.seen(probe, limit)) for probe in self.probes}
        return {name: measurement for name, measurement in stored.items() if measurement is not None}

    def to_do(self, kind: type[Probe]) -> list[Probe]:
        """The probes of that kind whose measurements are missing."""
        return [probe for probe in self.probes if isinstance(probe, kind) and probe.name not in self.found]

    def store(self, measurement: Measurement) -> None:
        """Write a measurement. Unfinished work stays where it helps: after a failure, or if time had run out."""
        measurement.write(self.files[measurement.probe])
        if is_final(measurement):
            self.patient.subject.scratch[measurement.probe].unlink(missing_ok=True)
