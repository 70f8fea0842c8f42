"""Which probes, and how thorough, within a budget of time.

Every probe is first planned in its cheapest form, in the order of what it tells; then, round by round and in the same
order, what is left of the budget makes them more thorough. What does not fit is left out by name.

A plan that was made once is remembered, so that the same command does the same again however the timings fall out; and
a form in which a probe is stored already is kept, for it costs nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.hashing import fingerprint
from vitclinic._core.io import write_errors, write_text
from vitclinic._core.records import Number, plain_data
from vitclinic._core.time import seconds
from vitclinic.exam.pace import Pace
from vitclinic.exam.store import Store
from vitclinic.exam.targets import Target
from vitclinic.probes import Probe, StreamingProbe, Subject, known_probes, parse_probes, usual_probes

BUDGET = "5m"
"""Unless the user gives one: what an exam of all targets together may take."""

LIMITS = (64, 256, 1024, 4096)
"""Images of the shared pass in its cheaper forms, unless the user has said how many."""

SHARED = "shared pass"
"""The name of the offer that all streaming probes are."""

_PATIENCE, _LEAST = 3, 10
"""A probe that can be cut off is, after so many times its estimate, and no sooner than after so many seconds."""


class Entry(Config):
    """A probe with its options, and what its own work takes for each target (NaN where that is not known)."""

    probe: str
    options: dict[str, Any]
    seconds: list[Number]


class Plan(Config):
    """What is measured, in order; streaming probes share a pass of at most `limit` images."""

    limit: int | None = None
    shared: list[Number]
    """Seconds of that pass for each target."""
    entries: list[Entry]
    left_out: dict[str, Number] = Field(default_factory=dict)
    """Seconds of the cheapest form of what does not fit."""


def candidates(
    probes: Sequence[Any] | None,
    budget: str | float | None,
    quick: bool,
    full: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Probe], float | None]:
    """What may be measured, and within how many seconds (None: whatever it takes), from what the user said.

    `settings` are options of probes that are meant anyway; the user's interest in those puts them first.
    """
    if sum((probes is not None, quick, full)) > 1:
        raise RecipeError("Give one of probes, quick and full: each of them says what is measured.")
    if budget is not None and (quick or full):
        raise RecipeError(f"A budget has no meaning with {'quick' if quick else 'full'}, which says what is measured.")
    if probes is not None:
        chosen = _with_settings(parse_probes(probes), settings)
    else:
        names = usual_probes() if quick else [name for name, probe in known_probes().items() if not probe.asked_for]
        names.sort(key=lambda name: (name not in settings, known_probes()[name].rank))
        chosen = _with_settings(parse_probes(names), settings)
        budget = budget if budget is not None or quick or full else BUDGET
    return chosen, None if budget is None else _checked(budget)


def _with_settings(probes: list[Probe], settings: Mapping[str, Mapping[str, Any]]) -> list[Probe]:
    names = [probe.name for probe in probes]
    for name in settings:
        if name not in names:
            hint = did_you_mean(name, names) or f" They are {', '.join(names)}."
            raise RecipeError(f"An option is set of '{name}', and that is not among the probes.{hint}")
    return [
        parse_probes([{probe.name: {**given(probe), **settings[probe.name]}}])[0] if probe.name in settings else probe
        for probe in probes
    ]


def _checked(budget: str | float) -> float:
    try:
        found = seconds(budget)
    except ValueError as error:
        raise RecipeError(f"'budget': {error} (got {budget!r}).") from None
    if not found:
        raise RecipeError("'budget' must be longer than nothing; --quick is the least that there is.")
    return found


def given(probe: Probe) -> dict[str, Any]:
    """The options that were given, of which none is changed to save time."""
    return {name: getattr(probe, name) for name in sorted(probe.model_fields_set)}


def forms(probe: Probe) -> list[Probe]:
    """The probe as thorough as it is, after its cheaper forms, the cheapest first; without repetitions."""
    fixed = given(probe)
    cheaper = (validate(type(probe), {**options, **fixed}, where=probe.name) for options in probe.cheaper)
    found: list[Probe] = []
    for form in (*cheaper, probe):
        if form not in found:
            found.append(form)
    return found


def limits(images: int) -> list[int | None]:
    """How many images the shared pass may have: cheaper numbers first, at last all (None)."""
    return [*(limit for limit in LIMITS if limit < images), None]


@dataclass(frozen=True)
class Offer:
    """Something that may be measured, in one of several forms."""

    name: str
    seconds: Sequence[float]
    """What each form costs, the cheapest first; NaN counts as nothing, for what cannot be timed fails at once."""
    stored: int | None = None
    """The most thorough form of which something is stored."""

    def cost(self, form: int) -> float:
        return 0.0 if math.isnan(self.seconds[form]) else self.seconds[form]


def choose(offers: Sequence[Offer], budget: float) -> dict[str, int]:
    """The form of each offer that is taken, by its name; offers are in the order of what they tell.

    Example:
        >>> choose([Offer("a", [1, 5]), Offer("b", [2, 3]), Offer("c", [9])], budget=7)
        {'a': 1, 'b': 0}
    """
    taken: dict[str, int] = {}
    left = budget
    for offer in offers:
        kept = offer.stored is not None and offer.cost(offer.stored) <= left
        form = offer.stored if kept and offer.stored is not None else 0
        if offer.cost(form) <= left:
            taken[offer.name] = form
            left -= offer.cost(form)
    raisable = [offer for offer in offers if offer.name in taken and taken[offer.name] != offer.stored]
    for _ in range(max((len(offer.seconds) for offer in raisable), default=0)):
        for offer in raisable:
            form = taken[offer.name]
            more = offer.cost(form + 1) - offer.cost(form) if form + 1 < len(offer.seconds) else math.inf
            if more <= left:
                taken[offer.name] = form + 1
                left -= more
    return taken


def capped(probe: Probe, longest: float) -> Probe:
    """The probe with a budget of its own, if it can have one and was not given any: its estimate may be wrong."""
    if "budget" not in type(probe).model_fields or "budget" in probe.model_fields_set or math.isnan(longest):
        return probe
    return validate(type(probe), {**given(probe), "budget": max(_LEAST, math.ceil(_PATIENCE * longest))})


def streaming(probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if isinstance(probe, StreamingProbe)]


def owning(probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if not isinstance(probe, StreamingProbe)]


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
