"""The page: measurements, findings and figures of one or several networks as one self-contained HTML file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitclinic.errors import RecipeError
from vitclinic.reports import views
from vitclinic.reports.contents import Examined
from vitclinic.reports.drawing import Drawings
from vitclinic.reports.frame import filled, write_page
from vitclinic.reports.prepared import prepared
from vitclinic.reports.sections import about, grouped, in_order, inapplicable, of_probe

log = logging.getLogger(__name__)

LIMIT = 8_000_000
"""Bytes that a page should stay below."""

NO_PICTURES = "Pictures of the data were left out of this page, as asked for."


def write_report(
    path: str | Path, examined: Sequence[Examined], *, title: str | None = None, images: bool = True
) -> Path:
    """Write the report on these networks as one HTML file, which opens offline."""
    written = write_page(path, render(examined, title=title, images=images))
    size = written.stat().st_size
    if size > LIMIT:
        log.warning("The report has %.1f MB; without pictures (--no-images) it is smaller.", size / 1e6)
    return written


def render(examined: Sequence[Examined], *, title: str | None = None, images: bool = True) -> str:
    """The page as HTML. Whatever a user named is shown as text; without `images`, no picture of the data is in it."""
    if not examined:
        raise RecipeError("There is nothing to report on: name a network that was examined.")
    shown = prepared(examined)
    drawings = Drawings(images)
    training = drawings.of("training", shown) if any(one.training for one in shown) else []
    groups = _groups(shown, drawings)
    anchors = {section["id"] for group in groups for section in group["sections"]} | (
        {"training"} if training else set()
    )
    contents = {
        "title": title or _title([one.name for one in shown]),
        "measured_when": _measured_when(shown),
        "networks": views.networks(shown, anchors),
        "remarks": [] if images else [NO_PICTURES],
        "rows": views.summary_rows(shown),
        "titles": {probe: about(probe).title for probe in in_order(shown)},
        "training": training,
        "groups": groups,
        "inapplicable": inapplicable(shown),
    }
    return filled("page.html", drawings, **contents)


def _groups(examined: Sequence[Examined], drawings: Drawings) -> list[dict[str, Any]]:
    groups = []
    for name, probes in grouped(examined).items():
        sections = [_section(examined, probe, drawings) for probe in probes if of_probe(examined, probe)]
        if sections:
            groups.append({"name": name, "id": f"group-{name.split()[0].lower()}", "sections": sections})
    return groups


def _section(examined: Sequence[Examined], probe: str, drawings: Drawings) -> dict[str, Any]:
    records = views.records(examined, probe)
    return {
        "probe": probe,
        "id": views.section_id(probe),
        "about": about(probe),
        "remarks": views.remarks(examined, probe),
        "figures": drawings.of(probe, examined),
        "scalars": views.scalar_rows(examined, probe),
        "networks": records,
        "records": records,
        "gist": views.gist(records),
    }


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Exam of {names[0]}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) <= 3 else f"{len(names)} networks compared"


def _measured_when(examined: Sequence[Examined]) -> str:
    found = [measurement for one in examined for measurement in one.measurements.values()]
    if not found:
        return "Nothing measured yet."
    dates = sorted(measurement.provenance.date[:10] for measurement in found)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    one = len(examined) == 1
    return f"{len(found)} measurements of {'one network' if one else f'{len(examined)} networks'}, {when}"
