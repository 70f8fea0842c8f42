"""The contents of a report: its probes, in order and under their headings, and their key numbers, a column a network.

A value is marked as the better one where its probe says which way is better, the networks were measured alike (the same
images, options and conditions, all converged), and its interval overlaps none of the others'. A number without an
interval is taken as exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitclinic._core.records import Measurement, Scalar
from vitclinic._core.registry import OTHER, Better, KeyScalars, ProbeFacts
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


@dataclass(frozen=True)
class Cell:
    """One number of one network."""

    scalar: Scalar | None
    best: bool = False
    converged: bool = True


@dataclass(frozen=True)
class Row:
    """One number of all networks."""

    probe: str
    scalar: str
    better: Better | None
    cells: Sequence[Cell]
    alike: bool
    """Whether all networks were measured on the same images, with the same options, under the same conditions."""


FEW = 6
"""How many scalars are shown of a probe that does not say which are its key ones."""


def summarize(exams: Sequence[ExamView]) -> list[Row]:
    """Return the rows, in the order of the page's sections; without those that no network has."""
    rows = []
    for probe in order_probes(exams):
        measurements = [one.measurements.get(probe) for one in exams]
        for scalar, better in _select_scalars(find_facts(exams, probe).key_scalars, measurements).items():
            rows.append(_row(measurements, probe, scalar, better))
    return rows


def find_best(scalars: Sequence[Scalar | None], better: Better | None) -> int | None:
    """Return the place of the value that is better than all others beyond their intervals, if there is one.

    Example:
        >>> find_best([Scalar(value=0.5, low=0.4, high=0.6), Scalar(value=0.7, low=0.65, high=0.75)], "higher")
        1
    """
    present = {place: scalar for place, scalar in enumerate(scalars) if scalar is not None}
    if better is None or len(present) < 2:
        return None
    spans = {place: _span(scalar, better) for place, scalar in present.items()}
    if any(math.isnan(end) for span in spans.values() for end in span):
        return None
    best = min(spans, key=lambda place: spans[place][1])
    separate = all(spans[best][1] < low for place, (low, _) in spans.items() if place != best)
    return best if separate else None


def _span(scalar: Scalar, better: Better) -> tuple[float, float]:
    """Return the interval on a scale on which less is better."""
    low = scalar.value if scalar.low is None else scalar.low
    high = scalar.value if scalar.high is None else scalar.high
    if better == "higher":
        return -high, -low
    if better == "lower":
        return low, high
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _select_scalars(key_scalars: KeyScalars, measurements: Sequence[Measurement | None]) -> KeyScalars:
    there = dict.fromkeys(name for found in measurements if found is not None for name in found.scalars)
    if not key_scalars:
        return dict.fromkeys(list(there)[:FEW])
    return {name: better for name, better in key_scalars.items() if name in there}


def _row(measurements: Sequence[Measurement | None], probe: str, scalar: str, better: Better | None) -> Row:
    found = [None if one is None else one.scalars.get(scalar) for one in measurements]
    converged = [one is None or one.status == "ok" for one in measurements]
    alike = are_comparable(measurements)
    best = find_best(found, better) if alike and all(converged) else None
    cells = [Cell(value, place == best, well) for place, (value, well) in enumerate(zip(found, converged, strict=True))]
    return Row(probe, scalar, better, cells, alike)


def are_comparable(measurements: Sequence[Measurement | None]) -> bool:
    """Tell whether measurements were made on the same images, with the same options, under the same conditions."""
    there = [found for found in measurements if found is not None and found.status in ("ok", "not_converged")]
    return all(one.terms == there[0].terms for one in there)
