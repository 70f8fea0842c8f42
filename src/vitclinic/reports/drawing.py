"""Figures of probes that nobody has written a drawer for: every value of its units over depth."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from vitclinic._core.records import UnitRow
from vitclinic.reports.figure import DRAWERS, Examined, Figure, Picture, Table, measured
from vitclinic.reports.formatting import plain
from vitclinic.reports.theme import DASHES, MARKERS, of_network

READING = (
    "Each point is one unit of the network, from the input at the left to the head at the right, with its interval"
    " where there is one. The probe's own documentation says what the value means."
)


def drawn_generically(probe: str, examined: Sequence[Examined]) -> list[Figure]:
    """One line plot for each value that the probe's units have."""
    found = measured(examined, probe)
    values = dict.fromkeys(name for _, _, one in found for row in one.units for name in row.values)
    return [_over_depth(probe, value, number, examined) for number, value in enumerate(values, 1)]


def _over_depth(probe: str, value: str, number: int, examined: Sequence[Examined]) -> Figure:
    plot, rows = go.Figure(), []
    for place, name, measurement in measured(examined, probe):
        units = [row for row in measurement.units if value in row.values]
        if units:
            plot.add_trace(_line(place, name, value, units))
            rows += [_numbers(name, value, row) for row in units]
    plot.update_layout(xaxis_title="depth", yaxis_title=plain(value), height=380, showlegend=True)
    return Figure(
        name=re.sub(r"[^A-Za-z0-9]+", "-", f"{probe}-value-{number}").strip("-"),
        title=f"{value} by depth",
        reading=READING,
        paper="",
        table=Table(("network", "unit", "kind", "depth", value, "low", "high"), rows),
        plot=plot,
    )


def _line(place: int, name: str, value: str, units: Sequence[UnitRow]) -> go.Scatter:
    scalars = [row.values[value] for row in units]
    return go.Scatter(
        x=[row.depth for row in units],
        y=[scalar.value for scalar in scalars],
        error_y={
            "array": [None if scalar.high is None else scalar.high - scalar.value for scalar in scalars],
            "arrayminus": [None if scalar.low is None else scalar.value - scalar.low for scalar in scalars],
            "thickness": 1,
        },
        name=plain(name),
        text=[plain(row.name) for row in units],
        hovertemplate="%{text}: %{y:.4g}",
        mode="lines+markers",
        line={"color": of_network(place), "dash": DASHES[place % len(DASHES)]},
        marker={"symbol": MARKERS[place % len(MARKERS)], "size": 7},
    )


def _numbers(name: str, value: str, row: UnitRow) -> tuple[object, ...]:
    scalar = row.values[value]
    return (name, row.name, row.kind, row.depth, scalar.value, scalar.low, scalar.high)


def packed(text: str) -> str:
    """`text` as base64 of gzip: the same for the same text, whenever it is made."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")


@cache
def packed_plotly() -> str:
    """The program that draws, as the installed plotly package has it."""
    return packed(get_plotlyjs())


def checksum(script: str) -> str:
    """By which a content security policy knows a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}"


@cache
def plotly_checksum() -> str:
    return checksum(get_plotlyjs())


def plot_json(plot: go.Figure, images: bool = True) -> str:
    """What plotly draws, without its colours for the page, which are the page's theme; perhaps without images."""
    figure: dict[str, Any] = json.loads(plot.to_json(validate=False))
    layout = figure.get("layout", {})
    layout.pop("template", None)
    if not images:
        layout.pop("images", None)
        figure["data"] = [trace for trace in figure.get("data", []) if trace.get("type") != "image"]
    return json.dumps({"data": figure.get("data", []), "layout": layout}, separators=(",", ":"))


def as_csv(table: Table) -> str:
    """A figure's numbers, as RFC 4180 has it; empty where there is none.

    A text that a spreadsheet would take for a formula gets an apostrophe in front, which such programs hide.

    Example:
        >>> as_csv(Table(("class", "accuracy"), [("=1+1", 0.5), ("cat", None)])).split("\\r\\n")
        ['class,accuracy', "'=1+1,0.5", 'cat,', '']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for row in (table.columns, *table.rows):
        writer.writerow([_cell(value) for value in row])
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


log = logging.getLogger(__name__)

DEFAULT_HEIGHT = 420


@dataclass
class Drawings:
    """The figures of one page, and what it carries of them by name."""

    images: bool
    packed: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    """How many pictures are not in the page, because nobody wants them there."""
    _names: set[str] = field(default_factory=set)

    def of(self, probe: str, examined: Sequence[Examined]) -> list[dict[str, Any]]:
        """The views of a probe's figures; a drawer that fails leaves its probe to the generic one, with a message."""
        try:
            drawer = DRAWERS.get(probe)
            figures = drawn_generically(probe, examined) if drawer is None else drawer(examined)
            return [self.view(figure) for figure in figures]
        except Exception as error:  # a measurement of another version may lack what its drawer looks for
            log.info("%s cannot be drawn", probe, exc_info=error)
            log.warning("The figures of %s cannot be drawn: %s: %s", probe, type(error).__name__, error)
            return [self.view(figure) for figure in drawn_generically(probe, examined)]

    def view(self, figure: Figure) -> dict[str, Any]:
        """What the templates show of a figure, which the page carries from now on."""
        name = self._own(figure.name)
        if figure.plot is not None:
            self.packed[f"plot-{name}"] = packed(plot_json(figure.plot, self.images))
        self.packed[f"csv-{name}"] = packed(as_csv(figure.table))
        pictures = figure.pictures if self.images else ()
        self.left_out += len(figure.pictures) - len(pictures)
        return {
            "name": name,
            "title": figure.title,
            "reading": figure.reading,
            "paper": figure.paper,
            "heavy": figure.heavy,
            "plotted": figure.plot is not None,
            "height": DEFAULT_HEIGHT if figure.plot is None else int(figure.plot.layout.height or DEFAULT_HEIGHT),
            "rows": len(figure.table.rows),
            "pictures": [_picture(picture) for picture in pictures],
            "left_out": _left_out(len(figure.pictures) - len(pictures)),
        }

    def _own(self, wanted: str) -> str:
        """A name of letters, digits and hyphens that no other figure of the page has."""
        base = re.sub(r"[^A-Za-z0-9]+", "-", wanted).strip("-") or "figure"
        candidates = (base if number == 1 else f"{base}-{number}" for number in range(1, len(self._names) + 2))
        name = next(candidate for candidate in candidates if candidate not in self._names)
        self._names.add(name)
        return name


def _picture(picture: Picture) -> dict[str, Any]:
    width, height = struct.unpack(">II", picture.png[16:24])  # where a PNG file says it
    return {
        "caption": picture.caption,
        "data": base64.b64encode(picture.png).decode("ascii"),
        "width": width,
        "height": height,
        "shape": round(width / height, 3),
    }


def _left_out(count: int) -> str:
    return f"{count} picture{'s' * (count != 1)} left out, as asked for." if count else ""
