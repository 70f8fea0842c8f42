"""The sections of a report: which probes there are, in what order and under what heading, as measurements say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitclinic._core.facts import OTHER, ProbeFacts
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView

GROUPS = ("Behaviour", "Representation", "Attention", "Curvature", "Network")
"""The order of our own groups on a page; those of other packages come after them."""

USABLE = ("ok", "not_converged")


def find_facts(exams: Sequence[ExamView], probe: str) -> ProbeFacts:
    """Return the facts about a probe that its measurements carry; of one that carries none, its name."""
    found = (one.measurements[probe].facts for one in exams if probe in one.measurements)
    return next((facts for facts in found if facts is not None), ProbeFacts(title=probe))


def group_probes(exams: Sequence[ExamView]) -> dict[str, list[str]]:
    """Return the probes that were measured of some network by group, in the page's order: by rank within a group."""
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
class Inapplicable:
    """Probes that have no meaning for some networks, for one reason."""

    probes: Sequence[str]
    networks: Sequence[str]
    reason: str


def gather_inapplicable(exams: Sequence[ExamView]) -> list[Inapplicable]:
    """What does not apply, gathered: one entry for each reason and the networks that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in exams:
        for probe, measurement in one.measurements.items():
            if measurement.status == "does_not_apply":
                reasons.setdefault((str(measurement.reason), probe), []).append(one.name)
    gathered: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, probe), networks in reasons.items():
        gathered.setdefault((reason, tuple(networks)), []).append(probe)
    return [Inapplicable(probes, networks, reason) for (reason, networks), probes in gathered.items()]


def select_applicable(exams: Sequence[ExamView], probe: str) -> list[tuple[int, str, Measurement]]:
    """(place, name, measurement) of the networks that the probe applies to, whatever came of it."""
    found = ((place, one.name, one.measurements.get(probe)) for place, one in enumerate(exams))
    return [
        (place, name, measurement)
        for place, name, measurement in found
        if measurement is not None and measurement.status != "does_not_apply"
    ]
