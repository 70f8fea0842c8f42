"""The page about some networks, in one file: findings, summary, training, a section for each probe.

The first half makes the data for the templates of measurements: networks, findings, cells, records and remarks.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Finding, Measurement, Scalar
from vitclinic._core.time import format_duration
from vitclinic.reports.figure import ExamView, format_interval, format_number, format_setting, network_colour
from vitclinic.reports.frame import Drawings, fill_template, write_page
from vitclinic.reports.summary import (
    Cell,
    Row,
    find_facts,
    gather_missing,
    group_probes,
    order_probes,
    select_applicable,
    summarize,
)

log = logging.getLogger(__name__)

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


LIMIT = 8_000_000
"""Bytes that a page should stay below."""

NO_PICTURES = "Pictures of the data were left out of this page, as asked for."

_ABSOLUTE = re.compile(r"(?:^|(?<=[\s'\"`(\[{=@:,;|]))~?/(?!/)[^\s'\"`<>|;,)\]}]*[^\s'\"`<>|;,)\]}.:]")


def write_report(path: str | Path, exams: Sequence[ExamView], *, title: str | None = None, images: bool = True) -> Path:
    """Write a report on some networks as one HTML file, which opens offline.

    Args:
        path: The file; its folder is made.
        exams: The networks, in the order of the page's columns.
        title: The page's heading; without one, the networks' names.
        images: Whether pictures of the data are in the page.

    Returns:
        The path. Beside it is `NAME-labels.csv`, if some labels are suspected.
    """
    from vitclinic.reports.figures.label_errors import write_suspects  # with plotly, which takes a while

    written = write_page(path, render(exams, title=title, images=images))
    write_suspects(written, exams)
    size = written.stat().st_size
    if size > LIMIT:
        log.warning("The report has %.1f MB; without pictures of the data it would be smaller.", size / 1e6)
    return written


def render(exams: Sequence[ExamView], *, title: str | None = None, images: bool = True) -> str:
    """Return the page as HTML. Names are shown as text; without `images`, no picture of the data is in it."""
    if not exams:
        raise RecipeError("There is nothing to report on: name a network that was examined.")
    shown = prepare_exams(exams)
    drawings = Drawings(images)
    training = drawings.of("training", shown) if any(one.training for one in shown) else []
    groups = _groups(shown, drawings)
    anchors = {section["id"] for group in groups for section in group["sections"]} | (
        {"training"} if training else set()
    )
    contents = {
        "title": title or _title([one.name for one in shown]),
        "measured_when": _describe_measurements(shown),
        "networks": view_networks(shown, anchors),
        "remarks": [] if images else [NO_PICTURES],
        "rows": view_summary(shown),
        "titles": {probe: find_facts(shown, probe).title for probe in order_probes(shown)},
        "training": training,
        "groups": groups,
        "missing": view_missing(shown),
    }
    return fill_template("page.html", drawings, **contents)


def _groups(exams: Sequence[ExamView], drawings: Drawings) -> list[dict[str, Any]]:
    groups = []
    for name, probes in group_probes(exams).items():
        sections = [_section(exams, probe, drawings) for probe in probes if select_applicable(exams, probe)]
        if sections:
            groups.append({"name": name, "id": anchor("group", name), "sections": sections})
    return groups


def _section(exams: Sequence[ExamView], probe: str, drawings: Drawings) -> dict[str, Any]:
    records = view_records(exams, probe)
    return {
        "probe": probe,
        "id": anchor("probe", probe),
        "about": find_facts(exams, probe),
        "remarks": view_remarks(exams, probe),
        "figures": drawings.of(probe, exams),
        "scalars": view_scalars(exams, probe),
        "networks": records,
        "records": records,
        "gist": describe_records(records),
    }


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Report: {names[0]}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) <= 3 else f"{len(names)} networks compared"


def _describe_measurements(exams: Sequence[ExamView]) -> str:
    found = [measurement for one in exams for measurement in one.measurements.values()]
    if not found:
        return "Nothing measured yet."
    dates = sorted(measurement.provenance.date[:10] for measurement in found)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    one = len(exams) == 1
    return f"{len(found)} measurements of {'one network' if one else f'{len(exams)} networks'}, {when}"


def prepare_exams(exams: Sequence[ExamView]) -> list[ExamView]:
    """Return the networks with distinct names and without folders of this machine: of a path, its last part stays."""
    names = [strip_folders(one.name) for one in exams]
    return [
        replace(
            one,
            name=name if names.count(name) == 1 else f"{name} ({number})",
            measurements={probe: _prepare_measurement(found) for probe, found in one.measurements.items()},
            findings=[Finding.model_validate(_strip_everywhere(finding.model_dump())) for finding in one.findings],
            facts=_strip_everywhere(dict(one.facts)),
            left_out=_strip_everywhere(dict(one.left_out)),
        )
        for number, (one, name) in enumerate(zip(exams, names, strict=True), 1)
    ]


def strip_folders(text: str) -> str:
    """Return a text in which only the last part of every absolute path is left.

    Example:
        >>> strip_folders("cannot read '/home/me/photos/cat/1.png' (see a/b, 4/255)")
        "cannot read '1.png' (see a/b, 4/255)"
    """
    return _ABSOLUTE.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


def _prepare_measurement(measurement: Measurement) -> Measurement:
    """Return a measurement without folders; scalars and arrays have names of classes, which may look like paths."""
    reason = None if measurement.reason is None else strip_folders(measurement.reason)
    return measurement.model_copy(
        update={
            "reason": reason,
            "config": _strip_everywhere(measurement.config),
            "units": [
                row if row.note is None else row.model_copy(update={"note": strip_folders(row.note)})
                for row in measurement.units
            ],
        }
    )


def _strip_everywhere(value: Any) -> Any:
    """Do the same for all texts in plain data."""
    if isinstance(value, str):
        return strip_folders(value)
    if isinstance(value, Mapping):
        return {key: _strip_everywhere(item) for key, item in value.items()}
    return type(value)(_strip_everywhere(item) for item in value) if isinstance(value, list | tuple) else value
