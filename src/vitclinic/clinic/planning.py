"""A plan for some networks: what is stored, what the rest costs, and what of it fits into a budget."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitclinic.clinic.plan import (
    SHARED,
    Entry,
    Offer,
    Plan,
    capped,
    choose,
    forms,
    given,
    limits,
    owning,
    streaming,
)
from vitclinic.clinic.store import Store
from vitclinic.clinic.targets import Target
from vitclinic.config import validate
from vitclinic.data.source import fingerprint
from vitclinic.errors import RecipeError
from vitclinic.files import write_errors, write_text
from vitclinic.measurement import plain_data
from vitclinic.probes import Pace, Probe, StreamingProbe, Subject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patient:
    """A network to be examined, with its images and where its measurements are kept."""

    target: Target
    subject: Subject
    store: Store

    @cached_property
    def pace(self) -> Pace:
        return Pace(self.subject)

    def seen(self, probe: Probe, limit: int | None) -> Subject:
        """What a probe is given: a limit that the plan has chosen is that of the shared pass."""
        if limit is None or not isinstance(probe, StreamingProbe):
            return self.subject
        return self.subject.on(self.subject.split, limit)

    def path(self, probe: Probe, limit: int | None) -> Path:
        """Where the measurement is, or will be."""
        return self.store.path(probe, self.seen(probe, limit))


class Planner:
    """Plans the examination of all patients by these probes, which are in the order of what they tell.

    With `fresh`, nothing counts as stored; `limited` says that the number of images is not the plan's to choose.
    """

    def __init__(self, patients: Sequence[Patient], probes: Sequence[Probe], *, fresh: bool, limited: bool) -> None:
        self.patients, self.probes, self.fresh = patients, probes, fresh
        self.streaming, self.owning = streaming(probes), owning(probes)
        images = max(len(patient.subject) for patient in patients)
        self.limits: list[int | None] = [None] if limited else limits(images)

    def fixed(self) -> Plan:
        """All probes as they are, whatever they take."""
        return self._plan(self.probes, None)

    def within(self, budget: float) -> Plan:
        """What fits into so many seconds: as it was planned before, if it was."""
        path = self._path(budget)
        plan = None if self.fresh else _read(path)
        if plan is None:
            plan = self._planned(budget)
            with write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(plan.model_dump(mode="json"), indent=2, allow_nan=False) + "\n")
        return plan

    def restored(self, entry: Entry) -> Probe:
        """The probe that an entry of a plan stands for."""
        budget = entry.options.get("budget")
        for form in forms(next(probe for probe in self.probes if probe.name == entry.probe)):
            if _options(form) == entry.options:
                return form
            if {**_options(form), "budget": budget} == entry.options:
                return validate(type(form), {**given(form), "budget": budget})
        raise RecipeError(f"A plan has {entry.probe} in a form that is not known.")

    def _planned(self, budget: float) -> Plan:
        variants = {probe.name: forms(probe) for probe in self.owning}
        offers = self._offers(variants)
        taken = choose(offers, budget)
        if not taken:
            least = min(offers, key=lambda offer: offer.cost(0))
            raise RecipeError(
                f"Nothing fits into {budget:g} seconds: the {least.name} alone takes about"
                f" {math.ceil(least.cost(0))} (--budget {max(1, math.ceil(least.cost(0) * 2))}s)."
            )
        limit = self.limits[taken.get(SHARED, 0)]
        chosen: list[Probe] = []
        for probe in self.probes:
            if isinstance(probe, StreamingProbe):
                chosen += [probe] if SHARED in taken else []
            elif probe.name in taken:
                form = variants[probe.name][taken[probe.name]]
                chosen.append(capped(form, max(patient.pace.of(form) for patient in self.patients)))
        left_out: dict[str, float] = {}
        for offer in offers:
            if offer.name not in taken:
                names = [probe.name for probe in self.streaming] if offer.name == SHARED else [offer.name]
                left_out |= dict.fromkeys(names, offer.cost(0))
        return self._plan(chosen, limit).model_copy(update={"left_out": left_out})

    def _offers(self, variants: dict[str, list[Probe]]) -> list[Offer]:
        offers: list[Offer] = []
        for probe in self.probes:
            if not isinstance(probe, StreamingProbe):
                offers.append(self._offer(probe.name, variants[probe.name]))
            elif all(offer.name != SHARED for offer in offers):
                offers.append(self._shared_offer())
        return offers

    def _offer(self, name: str, variants: list[Probe]) -> Offer:
        costs = [sum(self._seconds(patient, form) for patient in self.patients) for form in variants]
        kept = [form for form, probe in enumerate(variants) if any(self._stored(p, probe) for p in self.patients)]
        return Offer(name, costs, max(kept, default=None))

    def _shared_offer(self) -> Offer:
        costs = [sum(self._shared_seconds(patient, limit) for patient in self.patients) for limit in self.limits]
        kept = [
            form
            for form, limit in enumerate(self.limits)
            if any(self._stored(patient, probe, limit) for patient in self.patients for probe in self.streaming)
        ]
        return Offer(SHARED, costs, max(kept, default=None))

    def _plan(self, probes: Sequence[Probe], limit: int | None) -> Plan:
        return Plan(
            limit=limit,
            shared=[self._shared_seconds(patient, limit, probes) for patient in self.patients],
            entries=[
                Entry(
                    probe=probe.name,
                    options=_options(probe),
                    seconds=[self._seconds(patient, probe) for patient in self.patients],
                )
                for probe in probes
            ],
        )

    def _seconds(self, patient: Patient, probe: Probe) -> float:
        """Of what is not stored of a probe's own work."""
        return 0.0 if self._stored(patient, probe) else patient.pace.of(probe)

    def _shared_seconds(self, patient: Patient, limit: int | None, probes: Sequence[Probe] | None = None) -> float:
        missing = [
            probe
            for probe in (self.streaming if probes is None else streaming(probes))
            if not self._stored(patient, probe, limit)
        ]
        images = len(patient.subject) if limit is None else min(limit, len(patient.subject))
        return patient.pace.of_shared_pass(missing, images) if missing else 0.0

    def _stored(self, patient: Patient, probe: Probe, limit: int | None = None) -> bool:
        return not self.fresh and patient.path(probe, limit).is_file()

    def _path(self, budget: float) -> Path:
        """Where the plan is remembered: by all that it depends on but the clock."""
        networks = [(p.subject.digest, p.subject.data_digest, p.subject.seed) for p in self.patients]
        probes = [(probe.name, probe.revision, [_options(form) for form in forms(probe)]) for probe in self.probes]
        return self.patients[0].store.folder / f"{fingerprint(budget, networks, probes, self.limits)[:12]}.plan"


def _options(probe: Probe) -> dict[str, Any]:
    """The options that were given, as a plan has them."""
    options: dict[str, Any] = plain_data(given(probe), probe.name)
    return options


def _read(path: Path) -> Plan | None:
    """The plan at `path`, if there is one that can be read."""
    if not path.is_file():
        return None
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        return validate(Plan, stored)
    except (OSError, ValueError, RecipeError) as error:
        log.warning("'%s' cannot be read, and the exam is planned anew: %s", path, error)
        return None
