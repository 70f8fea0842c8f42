"""The summary: the key numbers of all probes, a column a network, and which of them is better.

A value is marked as the better one where its probe says which way is better, the networks were measured alike (the same
images, options and conditions, all converged), and its interval overlaps none of the others'. A number without an
interval is taken as exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitclinic._core.facts import Better, KeyScalars
from vitclinic._core.records import Measurement, Scalar
from vitclinic.reports.figure import ExamView
from vitclinic.reports.sections import find_facts, order_probes


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
