"""Plans of exams: which probes to run, and how thoroughly, within a time budget.

What a reader looks for first, the accuracy, is planned on all images if that is affordable. Then every probe is planned
in its cheapest form, in the order of what it tells, cheap ones before dear ones; then, round by round and in the same
order, what is left of the budget makes them more thorough. What does not fit is left out by name. A part of the budget
is kept back, because estimates are only estimates (see `timing.TimeBudget` for what happens when they prove wrong).

A plan that was made once is remembered, so that the same command does the same again however the timings fall out; and
a form in which a probe is stored already is kept, for it costs nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import DamagedFileError, RecipeError
from vitclinic._core.io import fingerprint, read_json_file, write_errors, write_text
from vitclinic._core.records import Number, plain_data
from vitclinic.exam.request import given_options
from vitclinic.exam.store import Store
from vitclinic.exam.timing import Pace
from vitclinic.probes import Probe, StreamingProbe

log = logging.getLogger(__name__)

LIMITS = (64, 256, 1024, 4096)
"""Images of a pass in its cheaper forms, unless the user has said how many."""

PLANNED = 0.8
"""Share of the budget that is planned."""
FIRST = 0.6
"""Share of what is planned that the probes with `on_all_images` may take."""

DEAR = 0.1
"""Share of what is planned above which a probe waits until all cheaper ones have a place."""

WHOLE, SHARED = "pass over all images", "shared pass"
"""The names of the offers that all streaming probes together are."""

SCHEMA = 2
"""Of stored plans: one of another schema is not looked for."""


class Entry(Config):
    """A probe with its options, and what its own work takes for each subject (NaN where that is not known)."""

    probe: str
    options: dict[str, Any]
    seconds: list[Number]
    limit: int | None = None
    """Images of the pass, of a streaming probe."""


class Plan(Config):
    """Steps of an exam, ordered by priority; streaming probes of the same limit share a pass."""

    entries: list[Entry]
    passes: dict[str, list[Number]] = Field(default_factory=dict)
    """Seconds of each pass for each subject, by its limit as text."""
    left_out: dict[str, Number] = Field(default_factory=dict)
    """Seconds of the cheapest form of what does not fit."""

    def seconds_of_pass(self, limit: int | None, place: int) -> float:
        """Return what the pass of so many images takes for a subject; NaN where that is not known."""
        found = self.passes.get(str(limit))
        return math.nan if found is None else found[place]


def forms(probe: Probe) -> list[Probe]:
    """Return the cheaper forms of a probe, the cheapest first, and then the probe itself, without repetitions."""
    fixed = given_options(probe)
    cheaper = (validate(type(probe), {**options, **fixed}, where=probe.name) for options in probe.cheaper)
    found: list[Probe] = []
    for form in (*cheaper, probe):
        if form not in found:
            found.append(form)
    return found


def limits(images: int) -> list[int | None]:
    """Return how many images a pass may have: cheaper numbers first, at last all (None)."""
    return [*(limit for limit in LIMITS if limit < images), None]


@dataclass(frozen=True)
class Offer:
    """Something that may be measured, in one of several forms."""

    name: str
    seconds: Sequence[float]
    """What each form costs, the cheapest first; NaN counts as nothing, for what cannot be timed fails at once."""
    stored: int | None = None
    """The most thorough form of which something is stored."""
    first: bool = False
    """Taken before all others, in the most thorough form that leaves them enough."""

    def cost(self, form: int) -> float:
        return 0.0 if math.isnan(self.seconds[form]) else self.seconds[form]


def choose(offers: Sequence[Offer], budget: float) -> dict[str, int]:
    """Return the form of each offer that is taken, by its name; offers are ordered by priority.

    Example:
        >>> choose([Offer("a", [1, 5]), Offer("b", [2, 3]), Offer("c", [9])], budget=7)
        {'a': 1, 'b': 0}
        >>> choose([Offer("a", [1, 2, 9], first=True), Offer("b", [2, 3])], budget=7)
        {'a': 1, 'b': 1}
    """
    taken: dict[str, int] = {}
    left = budget
    for offer in sorted(offers, key=lambda offer: (not offer.first, offer.cost(0) > DEAR * budget)):
        form = _starting_form(offer, left, budget)
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


def _starting_form(offer: Offer, left: float, budget: float) -> int:
    """Return the form that is stored, if it fits; the best affordable one of what comes first; else the cheapest."""
    if offer.stored is not None and offer.cost(offer.stored) <= left:
        return offer.stored
    if not offer.first:
        return 0
    return max((form for form in range(len(offer.seconds)) if offer.cost(form) <= FIRST * budget), default=0)


class Planner:
    """Plans the exam of some subjects by these probes, which are in the order of what they tell."""

    def __init__(self, stores: Sequence[Store], probes: Sequence[Probe], *, fresh: bool, limited: bool) -> None:
        """Make a planner.

        Args:
            stores: One for each subject.
            probes: What may be measured.
            fresh: Nothing counts as stored.
            limited: The number of images is the user's choice, not the plan's.
        """
        self.stores, self.probes, self.fresh = stores, probes, fresh
        self.paces = [Pace(store.subject) for store in stores]
        images = max(len(store.subject) for store in stores)
        self.limits: list[int | None] = [None] if limited else limits(images)

    def plan_all(self) -> Plan:
        """Plan all probes as they are, whatever they take."""
        return self._build_plan([(probe, None) for probe in self.probes])

    def plan_within(self, budget: float) -> tuple[Plan, bool]:
        """Plan what fits into so many seconds. Returns the plan, and whether it had been made before."""
        path = self._path(budget)
        stored = None if self.fresh else _read(path)
        if stored is not None:
            return stored, True
        plan = self._plan(budget)
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(plan.model_dump(mode="json"), indent=2, allow_nan=False) + "\n")
        return plan, False

    def restore(self, entry: Entry) -> Probe:
        """Return the probe that an entry of a plan stands for."""
        for form in forms(next(probe for probe in self.probes if probe.name == entry.probe)):
            if _options(form) == entry.options:
                return form
        raise RecipeError(f"The stored plan has options that {entry.probe} no longer has: examine `fresh`.")

    def _plan(self, budget: float) -> Plan:
        variants = {probe.name: forms(probe) for probe in self.probes if not isinstance(probe, StreamingProbe)}
        offers = self._offers(variants)
        taken = choose(offers, PLANNED * budget)
        if not taken:
            least = min(offers, key=lambda offer: offer.cost(0))
            raise RecipeError(
                f"Nothing fits into {budget:g} seconds: the {least.name} alone takes about {math.ceil(least.cost(0))};"
                f" give a `budget` of {max(1, math.ceil(least.cost(0) * 2))}s."
            )
        chosen: list[tuple[Probe, int | None]] = []
        left_out: dict[str, float] = {}
        costs = {offer.name: offer.cost(0) for offer in offers}
        for probe in self.probes:
            offer = _pass_of(probe) if isinstance(probe, StreamingProbe) else probe.name
            if offer not in taken:
                left_out[probe.name] = costs[offer]
            elif isinstance(probe, StreamingProbe):
                chosen.append((probe, self.limits[taken[offer]]))
            else:
                chosen.append((variants[probe.name][taken[offer]], None))
        return self._build_plan(chosen).model_copy(update={"left_out": left_out})

    def _offers(self, variants: Mapping[str, list[Probe]]) -> list[Offer]:
        offers: dict[str, Offer] = {}
        for probe in self.probes:
            if not isinstance(probe, StreamingProbe):
                offers[probe.name] = self._offer(probe.name, variants[probe.name])
            elif (name := _pass_of(probe)) not in offers:
                offers[name] = self._offer_pass(name)
        return list(offers.values())

    def _offer(self, name: str, variants: list[Probe]) -> Offer:
        places = range(len(self.stores))
        costs = [sum(self._seconds(place, form) for place in places) for form in variants]
        kept = [form for form, probe in enumerate(variants) if any(self._is_stored(p, probe) for p in places)]
        return Offer(name, costs, max(kept, default=None))

    def _offer_pass(self, name: str) -> Offer:
        probes = [probe for probe in self.probes if isinstance(probe, StreamingProbe) and _pass_of(probe) == name]
        places = range(len(self.stores))
        costs = [sum(self._seconds_of_pass(place, probes, limit) for place in places) for limit in self.limits]
        kept = [
            form
            for form, limit in enumerate(self.limits)
            if any(self._is_stored(place, probe, limit) for place in places for probe in probes)
        ]
        return Offer(name, costs, max(kept, default=None), first=name == WHOLE)

    def _build_plan(self, chosen: Sequence[tuple[Probe, int | None]]) -> Plan:
        """Make the plan of these probes with their limits, with what each takes."""
        places = range(len(self.stores))
        passes: dict[int | None, list[Probe]] = {}
        for probe, limit in chosen:
            if isinstance(probe, StreamingProbe):
                passes.setdefault(limit, []).append(probe)
        return Plan(
            entries=[
                Entry(
                    probe=probe.name,
                    options=_options(probe),
                    seconds=[self._seconds(place, probe) for place in places],
                    limit=limit,
                )
                for probe, limit in chosen
            ],
            passes={
                str(limit): [self._seconds_of_pass(place, probes, limit) for place in places]
                for limit, probes in passes.items()
            },
        )

    def _seconds(self, place: int, probe: Probe) -> float:
        """Return what a probe's own work takes, if it is not stored."""
        return 0.0 if self._is_stored(place, probe) else self.paces[place].of(probe)

    def _seconds_of_pass(self, place: int, probes: Sequence[Probe], limit: int | None) -> float:
        missing = [probe for probe in probes if not self._is_stored(place, probe, limit)]
        count = len(self.stores[place].subject)
        images = count if limit is None else min(limit, count)
        return self.paces[place].of_shared_pass(missing, images) if missing else 0.0

    def _is_stored(self, place: int, probe: Probe, limit: int | None = None) -> bool:
        return not self.fresh and self.stores[place].has(probe, limit)

    def _path(self, budget: float) -> Path:
        """Return where the plan is remembered: by all that it depends on but the clock."""
        subjects = [store.subject for store in self.stores]
        networks = [(subject.digest, subject.data_digest, subject.seed) for subject in subjects]
        probes = [(probe.name, probe.revision, [_options(form) for form in forms(probe)]) for probe in self.probes]
        key = fingerprint(SCHEMA, budget, networks, probes, self.limits)
        return self.stores[0].folder / f"{key[:12]}.plan"


def _pass_of(probe: StreamingProbe) -> str:
    return WHOLE if probe.on_all_images else SHARED


def _options(probe: Probe) -> dict[str, Any]:
    """Return the options that were given, as a plan has them."""
    options: dict[str, Any] = plain_data(given_options(probe), probe.name)
    return options


def _read(path: Path) -> Plan | None:
    """Return the plan at `path`, if there is one that can be read."""
    if not path.is_file():
        return None
    try:
        return validate(Plan, read_json_file(path, DamagedFileError))
    except (DamagedFileError, RecipeError) as error:
        log.warning("'%s' cannot be read, and the exam is planned again: %s", path, error)
        return None
