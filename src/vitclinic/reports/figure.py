"""Records that a report is made of: exams, and the figures, tables and pictures that show them; and how they look.

Numbers and names are formatted here, and escaped for plotly, whose labels are a kind of HTML. Colours of networks and
of the kinds of units are safe for colour-blind readers and legible on light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitclinic._core.records import Finding, Measurement, Scalar

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from vitclinic.reports.image_lists import Album


@dataclass(frozen=True)
class ExamView:
    """One network as a report shows it: its name, measurements, findings and training."""

    name: str
    """As the user wrote it; anything may stand here, and is escaped where it is shown."""
    measurements: Mapping[str, Measurement]
    """By probe."""
    findings: Sequence[Finding] = ()
    training: Sequence[Mapping[str, Any]] = ()
    """The rows of a run's metrics.jsonl: kind, step, epoch, loss, ..."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else is known, in its order, for the head of the page: data, recipe, treatments, parameters."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why some probes were not measured that could have been, by probe."""


@dataclass(frozen=True)
class Picture:
    """An image of the user's, or a drawing over one; a page without images leaves it out."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Table:
    """A figure's numbers, as they go into its CSV."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Figure:
    """A plot or some pictures, with what a reader needs to understand them."""

    name: str
    """Of letters, digits and hyphens, unique on the page: `fourier-depth`."""
    title: str
    reading: str
    """Two sentences on how to read it."""
    paper: str
    """Where it comes from: "Park and Kim 2022, Fig. 2a (P6)"; empty if from none of the papers."""
    table: Table
    plot: go.Figure | None = None
    pictures: Sequence[Picture] = ()
    album: Album | None = None
    """Images of the data that open from a matrix or a list."""
    notes: Sequence[str] = ()
    """What a reader should know beside it, a sentence each."""
    heavy: bool = False
    """Closed until somebody opens it, and drawn then, as are surfaces in three dimensions."""


Drawer = Callable[[Sequence[ExamView]], list[Figure]]
DRAWERS: dict[str, Drawer] = {}
"""By probe; `training` draws a run's metrics."""


def draws(probe: str) -> Callable[[Drawer], Drawer]:
    """Make a function draw the measurements of `probe`; use it as a decorator.

    Args:
        probe: The probe's name.

    Returns:
        The decorator. Its function takes the exams of the report and returns figures, none where there is nothing to
        draw.
    """

    def register(drawer: Drawer) -> Drawer:
        DRAWERS[probe] = drawer
        return drawer

    return register


def select_usable(exams: Sequence[ExamView], probe: str) -> list[tuple[int, str, Measurement]]:
    """Return the usable measurements of a probe: those that applied and did not fail.

    Args:
        exams: The networks of a report.
        probe: The probe's name.

    Returns:
        (place, name, measurement) of each network that has one; the place in the report decides the network's colour.
    """
    found = ((place, one.name, one.measurements.get(probe)) for place, one in enumerate(exams))
    return [
        (place, name, measurement)
        for place, name, measurement in found
        if measurement is not None and measurement.status in ("ok", "not_converged")
    ]


_MEANT_BY_PLOTLY = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"}
"""Entities and tags; formulas between dollars; `%{...}` in hover templates."""


def escape_plotly(text: object) -> str:
    """Return a text in one line that plotly shows as it is, also inside a hover template.

    Args:
        text: Any text, such as a name that a user gave.

    Example:
        >>> escape_plotly("<b>%{x}</b> & more")
        '&lt;b&gt;&#37;{x}&lt;/b&gt; &amp; more'
    """
    line = " ".join(str(text).encode("utf-8", "replace").decode().split())
    visible = "".join(character for character in line if character == " " or character.isprintable())
    return re.sub("[&<>$%]", lambda found: _MEANT_BY_PLOTLY[found[0]], visible)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_number(value: float) -> str:
    """Return a number with four digits, a count in full.

    Example:
        >>> [format_number(value) for value in (0.123456, 5717416.0, 3.2e9, math.nan, -4e-05)]
        ['0.1235', '5,717,416', '3.2 × 10⁹', 'not a number', '-4 × 10⁻⁵']
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value.is_integer() and abs(value) < 1e9:
        return f"{value:,.0f}"
    digits, _, exponent = f"{value:.4g}".partition("e")
    return f"{digits} × 10{str(int(exponent)).translate(_RAISED)}" if exponent else digits


def format_interval(scalar: Scalar) -> str:
    """Return a scalar's interval, or an empty text.

    Example:
        >>> format_interval(Scalar(value=0.5, low=0.44, high=0.56)), format_interval(Scalar(value=0.5))
        ('0.44 to 0.56', '')
    """
    return (
        ""
        if scalar.low is None or scalar.high is None
        else f"{format_number(scalar.low)} to {format_number(scalar.high)}"
    )


def format_setting(value: Any) -> str:
    """Return an option's value in one line.

    Example:
        >>> format_setting(True), format_setting(None), format_setting([1, 2]), format_setting(0.05)
        ('yes', 'none', '1, 2', '0.05')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list):
        return ", ".join(map(format_setting, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_setting(item)}" for key, item in value.items())
    return str(value)


NETWORKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A")
"""Okabe and Ito's, by a network's place in the report (modulo their number)."""

DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
"""Beside the colour, so that a figure can be read without colours."""

SEQUENTIAL = "Viridis"
DIVERGING = "RdBu_r"

KINDS = {
    "msa": "rgba(0, 114, 178, 0.16)",
    "mlp": "rgba(230, 159, 0, 0.13)",
    "conv": "rgba(230, 159, 0, 0.13)",
    "token_mlp": "rgba(0, 158, 115, 0.15)",
    "pool": "rgba(120, 120, 120, 0.26)",
}
"""The shading behind a unit of this kind in a figure over depth: convs and MLPs do the same work [park2022 Fig. 9]."""

KIND_MARKS = {
    "stem": "#7A7A7A",
    "position": "#CC79A7",
    "msa": "#0072B2",
    "mlp": "#E69F00",
    "conv": "#D55E00",
    "token_mlp": "#009E73",
    "pool": "#56B4E9",
    "head": "#8C6BB1",
}
"""The colour of a unit of this kind where it stands for the unit itself: on the axes of a matrix of units."""

KIND_SYMBOLS = {
    "stem": "x",
    "position": "cross",
    "msa": "circle",
    "mlp": "square",
    "conv": "triangle-up",
    "token_mlp": "diamond",
    "pool": "triangle-down",
    "head": "star",
}
"""The marker of a unit of this kind."""


def network_colour(place: int) -> str:
    """Return the colour of the network at this place of the report."""
    return NETWORKS[place % len(NETWORKS)]


def with_opacity(place: int, opacity: float) -> str:
    """Return the network's colour as rgba(), for bands of uncertainty."""
    red, green, blue = (int(network_colour(place)[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def template(dark: bool) -> dict[str, Any]:
    """Return plotly's template for the light or the dark theme; the background is the page's own."""
    ink, faint, line, box = (
        ("#d7dce2", "#333b45", "#5a6570", "#232a32") if dark else ("#2b333b", "#e3e7eb", "#9aa5b1", "#ffffff")
    )
    axis = {
        "gridcolor": faint,
        "linecolor": line,
        "zerolinecolor": line,
        "zerolinewidth": 1,
        "tickcolor": line,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    in_space = {
        "gridcolor": line,
        "linecolor": line,
        "zerolinecolor": line,
        "showbackground": False,
        "tickcolor": line,
        "tickfont": {"size": 10},
        "title": {"font": {"size": 11}},
    }
    colorbar = {"outlinewidth": 0, "thickness": 14, "tickcolor": line, "ticks": "outside", "ticklen": 4}
    mapped = {kind: [{"colorbar": colorbar}] for kind in ("heatmap", "contour", "surface", "histogram2d")}
    return {
        "layout": {
            "font": {"family": FONT, "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(NETWORKS),
            "margin": {"l": 56, "r": 16, "t": 40, "b": 48},
            "xaxis": axis,
            "yaxis": axis,
            "polar": {"bgcolor": "rgba(0,0,0,0)", "angularaxis": axis, "radialaxis": axis},
            "scene": dict.fromkeys(("xaxis", "yaxis", "zaxis"), in_space),
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
            "hoverlabel": {"bgcolor": box, "bordercolor": line, "font": {"color": ink}, "namelength": -1},
            "annotationdefaults": {"font": {"color": ink, "size": 13}, "arrowcolor": ink},
            "shapedefaults": {"line": {"color": line}},
            "coloraxis": {"colorbar": colorbar},
        },
        "data": mapped,
    }
