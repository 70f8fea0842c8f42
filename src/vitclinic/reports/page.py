"""Networks as a page may show them: each by a name of its own, and without where things lie on this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Finding, Measurement
from vitclinic.reports import figures, views  # noqa: F401  (figures make themselves known)
from vitclinic.reports.drawing import Drawings
from vitclinic.reports.figure import Examined
from vitclinic.reports.frame import filled, write_page
from vitclinic.reports.sections import facts_of, grouped, in_order, inapplicable, of_probe

_ABSOLUTE = re.compile(r"(?:^|(?<=[\s'\"`(\[{=@:,;|]))~?/(?!/)[^\s'\"`<>|;,)\]}]*[^\s'\"`<>|;,)\]}.:]")


def prepared(examined: Sequence[Examined]) -> list[Examined]:
    """The networks with distinct names; of absolute paths, wherever one is written, the last part is left."""
    names = [without_places(one.name) for one in examined]
    return [
        replace(
            one,
            name=name if names.count(name) == 1 else f"{name} ({number})",
            measurements={probe: _measurement(found) for probe, found in one.measurements.items()},
            findings=[Finding.model_validate(_everywhere(finding.model_dump())) for finding in one.findings],
            facts=_everywhere(dict(one.facts)),
        )
        for number, (one, name) in enumerate(zip(examined, names, strict=True), 1)
    ]


def without_places(text: str) -> str:
    """`text`, in which of every absolute path only the last part is left.

    Example:
        >>> without_places("cannot read '/home/me/photos/cat/1.png' (see a/b, 4/255)")
        "cannot read '1.png' (see a/b, 4/255)"
    """
    return _ABSOLUTE.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


def _measurement(measurement: Measurement) -> Measurement:
    """Not its scalars and arrays: these are numbers, and names of classes, which may look like paths."""
    reason = None if measurement.reason is None else without_places(measurement.reason)
    return measurement.model_copy(
        update={
            "reason": reason,
            "config": _everywhere(measurement.config),
            "units": [
                row if row.note is None else row.model_copy(update={"note": without_places(row.note)})
                for row in measurement.units
            ],
        }
    )


def _everywhere(value: Any) -> Any:
    """The same for all texts in plain data."""
    if isinstance(value, str):
        return without_places(value)
    if isinstance(value, Mapping):
        return {key: _everywhere(item) for key, item in value.items()}
    return type(value)(_everywhere(item) for item in value) if isinstance(value, list | tuple) else value


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
        "titles": {probe: facts_of(shown, probe).title for probe in in_order(shown)},
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
            groups.append({"name": name, "id": views.anchor("group", name), "sections": sections})
    return groups


def _section(examined: Sequence[Examined], probe: str, drawings: Drawings) -> dict[str, Any]:
    records = views.records(examined, probe)
    return {
        "probe": probe,
        "id": views.anchor("probe", probe),
        "about": facts_of(examined, probe),
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
