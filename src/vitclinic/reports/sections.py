"""Sections of a report: which probes there are, in what order and under which heading, as their measurements say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitclinic._core.facts import OTHER, ProbeFacts
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView

GROUPS = ("Behaviour", "Representation", "Attention", "Curvature", "Network")
"""The order of our own groups on a page; those of other packages come after them."""

USABLE = ("ok", "not_converged")


def find_facts(exams: Sequence[ExamView], probe: str) -> ProbeFacts:
    """Return the facts about a probe from its measurements; its name is its title where they have none."""
    found = (one.measurements[probe].facts for one in exams if probe in one.measurements)
    return next((facts for facts in found if facts is not None), ProbeFacts(title=probe))


def group_probes(exams: Sequence[ExamView]) -> dict[str, list[str]]:
    """Return the probes that were measured, by group and in the page's order: by rank within a group."""
    there = dict.fromkeys(probe for one in exams for probe in one.measurements)
    facts = {probe: find_facts(exams, probe) for probe in there}
    groups: dict[str, list[str]] = {}
    for probe in sorted(there, key=lambda probe: facts[probe].rank):
        groups.setdefault(facts[probe].group, []).append(probe)
    own = [group for group in groups if group not in (*GROUPS, OTHER)]
    return {group: groups[group] for group in (*GROUPS, *own, OTHER) if group in groups}


def order_probes(exams: Sequence[ExamView]) -> list[str]:
    """Return the same probes in one list."""
    return [probe for probes in group_probes(exams).values() for probe in probes]


@dataclass(frozen=True)
class Missing:
    """Probes without a result for some networks, for one reason."""

    probes: Sequence[str]
    places: Sequence[int]
    """The networks, by their place in the report."""
    reason: str
    """A few words."""
    details: Sequence[str]
    """The reason at full length, where it is longer: of each probe, if the probes' reasons differ."""


def gather_missing(exams: Sequence[ExamView]) -> list[Missing]:
    """Return what does not apply or was left out: one entry for each short reason and the networks it holds for."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, one in enumerate(exams):
        unmet = {probe: found for probe, found in one.measurements.items() if found.status == "does_not_apply"}
        reasons = {**{probe: str(found.reason) for probe, found in unmet.items()}, **one.left_out}
        for probe, reason in reasons.items():
            places.setdefault((probe, reason), []).append(place)
    gathered: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}
    for (probe, reason), networks in places.items():
        gathered.setdefault((_shorten(reason), tuple(networks)), {})[probe] = reason
    return [
        Missing(list(reasons), networks, short, _details(short, reasons))
        for (short, networks), reasons in gathered.items()
    ]


def _shorten(reason: str) -> str:
    """Return the reason up to its first stop, as a sentence.

    Example:
        >>> _shorten("there was no time for it: at least 20 s.")
        'There was no time for it.'
    """
    words = re.split(r"[.:;](?:\s|$)", reason, maxsplit=1)[0]
    return f"{words[:1].upper()}{words[1:]}."


def _details(short: str, reasons: Mapping[str, str]) -> list[str]:
    if all(_shorten(reason).lower() == reason.lower() for reason in reasons.values()):
        return []
    if len(set(reasons.values())) == 1:
        return [next(iter(reasons.values()))]
    head = len(short)
    return [f"{probe}: {reason[head:].strip() or reason}" for probe, reason in reasons.items()]


def select_applicable(exams: Sequence[ExamView], probe: str) -> list[tuple[int, str, Measurement]]:
    """Return (place, name, measurement) of the networks that the probe applies to, also where it failed."""
    found = ((place, one.name, one.measurements.get(probe)) for place, one in enumerate(exams))
    return [
        (place, name, measurement)
        for place, name, measurement in found
        if measurement is not None and measurement.status != "does_not_apply"
    ]
