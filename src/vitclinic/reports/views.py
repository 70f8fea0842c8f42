"""Data for the templates, made of measurements: networks, findings, cells, records and remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from vitclinic._core.records import Finding, Scalar
from vitclinic._core.time import format_duration
from vitclinic.reports.figure import ExamView
from vitclinic.reports.formatting import format_interval, format_number, format_setting
from vitclinic.reports.summary import Cell, Row, gather_missing, select_applicable, summarize
from vitclinic.reports.theme import network_colour

SEVERITIES = ("problem", "notice", "healthy")

_BASES = {
    "reference network": "compared with the reference network",
    "published range": "relative to the published range",
    "heuristic": "a heuristic",
}
_WORDS = {"not_converged": "Has not converged", "failed": "Failed", "ok": "ok"}


@dataclass(frozen=True)
class Network:
    """A network at the head of the page or of a column: its letter and colour stand for it."""

    name: str
    letter: str
    colour: str
    facts: Mapping[str, str]
    findings: Sequence[dict[str, Any]]
    counts: Mapping[str, int]


def anchor(kind: str, name: str) -> str:
    """Return the anchor of a probe's section or of a group: other packages name these as they like.

    Example:
        >>> anchor("probe", "my.own probe")
        'probe-my-own-probe'
    """
    safe = "".join(character if character.isalnum() or character == "_" else "-" for character in name)
    return f"{kind}-{safe.lower() if kind == 'group' else safe}"


def view_networks(exams: Sequence[ExamView], anchors: Container[str]) -> list[Network]:
    """Return all networks, their problems first; numbers lead to their sections, if these are among `anchors`."""
    found = []
    for place, one in enumerate(exams):
        ordered = sorted(one.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        counts = Counter(str(finding.severity) for finding in ordered)
        views = [_finding(finding, anchors) for finding in ordered]
        found.append(Network(one.name, letter(place), network_colour(place), one.facts, views, counts))
    return found


def letter(place: int) -> str:
    """Return A, B, C, ..., Z, A2, ... for a place."""
    again = place // len(ascii_uppercase)
    return ascii_uppercase[place % len(ascii_uppercase)] + (str(again + 1) if again else "")


def _finding(finding: Finding, anchors: Container[str]) -> dict[str, Any]:
    return {
        **dict(finding),
        "basis_words": _BASES[finding.basis],
        "numbers": [
            (key, format_number(scalar.value), format_interval(scalar), _target(key, anchors))
            for key, scalar in finding.numbers.items()
        ],
    }


def _target(key: str, anchors: Container[str]) -> str | None:
    """Return the anchor of the section that a finding's number comes from."""
    probe = key.partition(".")[0]
    target = "training" if probe == "training" else anchor("probe", probe)
    return target if target in anchors else None


def view_summary(exams: Sequence[ExamView]) -> list[dict[str, Any]]:
    """Return the summary's rows; the first of each probe begins its group."""
    rows, last = [], None
    for row in summarize(exams):
        rows.append({**_row(row), "first": row.probe != last, "target": anchor("probe", row.probe)})
        last = row.probe
    return rows


def _row(row: Row) -> dict[str, Any]:
    return {
        "probe": row.probe,
        "scalar": row.scalar,
        "better": row.better,
        "alike": row.alike,
        "cells": [_cell(cell) for cell in row.cells],
        "unfinished": any(cell.scalar is not None and not cell.converged for cell in row.cells),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    written = ("", "") if cell.scalar is None else (format_number(cell.scalar.value), format_interval(cell.scalar))
    return {"value": written[0], "interval": written[1], "best": cell.best, "converged": cell.converged}


def view_scalars(exams: Sequence[ExamView], probe: str) -> list[dict[str, Any]]:
    """Return all scalars of one probe, of all networks that have some."""
    found = [(one.scalars, one.status == "ok") for _, _, one in select_applicable(exams, probe)]
    names = dict.fromkeys(name for scalars, _ in found for name in scalars)

    def cell(scalars: Mapping[str, Scalar], name: str, converged: bool) -> dict[str, Any]:
        return _cell(Cell(scalars.get(name), converged=converged))

    return [{"scalar": name, "cells": [cell(scalars, name, well) for scalars, well in found]} for name in names]


def view_records(exams: Sequence[ExamView], probe: str) -> list[dict[str, Any]]:
    """Return how the probe's measurements came about: settings, cost, date."""
    return [
        {
            "name": name,
            "letter": letter(place),
            "colour": network_colour(place),
            "status": _WORDS[one.status].lower(),
            "images": format_number(float(one.provenance.images)),
            "time": format_duration(one.provenance.duration),
            "date": one.provenance.date.replace("T", " ").replace("Z", " UTC"),
            "seed": one.provenance.seed,
            "device": one.provenance.device,
            "options": [(key, format_setting(value)) for key, value in one.config.items()],
        }
        for place, name, one in select_applicable(exams, probe)
    ]


def describe_records(found: Sequence[dict[str, Any]]) -> str:
    """Return the records of a section in a few words."""
    images, times = (list(dict.fromkeys(record[key] for record in found)) for key in ("images", "time"))
    dates = sorted({record["date"][:10] for record in found})
    return f"{' and '.join(images)} images, {' and '.join(times)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


def view_remarks(exams: Sequence[ExamView], probe: str) -> list[dict[str, Any]]:
    """Return what failed or has not converged, with its reason."""
    several = len(exams) > 1
    return [
        {
            "status": one.status,
            "word": _WORDS[one.status],
            "name": name if several else "",
            "letter": letter(place),
            "colour": network_colour(place),
            "reason": one.reason,
        }
        for place, name, one in select_applicable(exams, probe)
        if one.status != "ok"
    ]


def view_missing(exams: Sequence[ExamView]) -> list[dict[str, Any]]:
    """Return the lines on what was not measured; networks are named by their chips where it is not so of all."""
    return [
        {
            "probes": entry.probes,
            "reason": entry.reason,
            "details": entry.details,
            "networks": [
                {"letter": letter(place), "colour": network_colour(place), "name": exams[place].name}
                for place in entry.places
                if len(entry.places) < len(exams)
            ],
        }
        for entry in gather_missing(exams)
    ]
