"""Networks as a page may show them: each by a name of its own, and without where things lie on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitclinic.finding import Finding
from vitclinic.measurement import Measurement
from vitclinic.reports.contents import Examined

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
