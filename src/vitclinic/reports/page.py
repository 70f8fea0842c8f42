"""The page about some networks, in one file: findings, summary, training, a section for each probe."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Finding, Measurement
from vitclinic.reports import views
from vitclinic.reports.figure import ExamView
from vitclinic.reports.frame import Drawings, fill_template, write_page
from vitclinic.reports.summary import find_facts, group_probes, order_probes, select_applicable

log = logging.getLogger(__name__)

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
        The path.
    """
    written = write_page(path, render(exams, title=title, images=images))
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
        "networks": views.view_networks(shown, anchors),
        "remarks": [] if images else [NO_PICTURES],
        "rows": views.view_summary(shown),
        "titles": {probe: find_facts(shown, probe).title for probe in order_probes(shown)},
        "training": training,
        "groups": groups,
        "missing": views.view_missing(shown),
    }
    return fill_template("page.html", drawings, **contents)


def _groups(exams: Sequence[ExamView], drawings: Drawings) -> list[dict[str, Any]]:
    groups = []
    for name, probes in group_probes(exams).items():
        sections = [_section(exams, probe, drawings) for probe in probes if select_applicable(exams, probe)]
        if sections:
            groups.append({"name": name, "id": views.anchor("group", name), "sections": sections})
    return groups


def _section(exams: Sequence[ExamView], probe: str, drawings: Drawings) -> dict[str, Any]:
    records = views.view_records(exams, probe)
    return {
        "probe": probe,
        "id": views.anchor("probe", probe),
        "about": find_facts(exams, probe),
        "remarks": views.view_remarks(exams, probe),
        "figures": drawings.of(probe, exams),
        "scalars": views.view_scalars(exams, probe),
        "networks": records,
        "records": records,
        "gist": views.describe_records(records),
    }


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Exam of {names[0]}"
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
