"""Parts that all figures share: an empty plot, labels, lines with bands, points with bars, scalars side by side.

Nothing here colours texts or backgrounds: the page does, be it light or dark. Legends lie below the plot, which has a
height but no width, so that it also fits a phone. Scalars are bars from zero, or points where a logarithmic axis has no
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray
from plotly.subplots import make_subplots

from vitclinic._core.records import Measurement, Scalar
from vitclinic.reports.figure import DASHES, MARKERS, Table, escape_plotly, network_colour, with_opacity

GREY = "rgba(128, 128, 128, 0.9)"
GRID = "rgba(128, 128, 128, 0.22)"
CLEAR = "rgba(0, 0, 0, 0)"
LONGEST = 40
"""Characters of a network's name in a legend."""
PANEL_LONGEST = 20
"""Above a panel, of which there are two beside each other on a phone."""
LEGEND_LINE = 19
"""Pixels."""
COLOUR_BAR_HEIGHT = 80
"""Pixels of a bar of colours below a plot, with its labels."""
WIDE = 50.0
"""Where the largest value is so many times the smallest, an axis is logarithmic."""

_AXIS = {"zeroline": False, "automargin": True, "title_standoff": 8}
_LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom", "yref": "container"}
_MARGIN = {"l": 8, "r": 16, "b": 8}
_LINES = {"gridcolor": GRID, "linecolor": GREY, "ticks": "outside", "ticklen": 4, "tickcolor": CLEAR}
_TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"size": 12},
        "xaxis": _LINES,
        "yaxis": _LINES,
        "scene": {f"{axis}axis": {"gridcolor": GREY, "showbackground": False} for axis in "xyz"},
        "polar": {
            "bgcolor": CLEAR,
            "angularaxis": {"gridcolor": GRID, "linecolor": GREY},
            "radialaxis": {"gridcolor": GRID},
        },
        "coloraxis": {"colorbar": {"thickness": 12, "outlinewidth": 0}},
    }
)
"""The look of a plot that stands alone, as in a notebook; a page has its own. Where things are is no part of it."""

Floats = NDArray[np.float64]


def make_canvas(
    height: int, rows: int = 1, columns: int = 1, titles: Sequence[str] = (), *, legend: int = 0, **options: Any
) -> go.Figure:
    """Return an empty plot of some panels; `titles` are those of the panels, escaped, `options` make_subplots'.

    `height` is that without the legend, of which there are so many lines on a phone.
    """
    figure = make_subplots(rows, columns, subplot_titles=list(titles) or None, **options)
    figure.update_layout(
        template=_TEMPLATE,
        height=height + LEGEND_LINE * legend,
        margin={**_MARGIN, "t": 30 if titles else 10},
        legend={**_LEGEND, "font": {"size": 12}},
    )
    figure.update_annotations(font_size=13)
    figure.update_xaxes(**_AXIS)
    figure.update_yaxes(**_AXIS)
    return figure


def put_colours_below(figure: go.Figure, title: str, **axis: Any) -> None:
    """Put the bar of colours below the plot, where it takes no width from the panels; `axis` is the rest of it."""
    bar = {
        **{"orientation": "h", "x": 0.5, "xanchor": "center", "y": 0, "yanchor": "bottom", "yref": "container"},
        **{
            "len": 0.8,
            "title": {"text": f"{title}<br> ", "side": "top", "font": {"size": 12}},
            **axis.pop("colorbar", {}),
        },
    }
    figure.update_layout(coloraxis={**axis, "colorbar": bar}, margin_b=COLOUR_BAR_HEIGHT)


def label(name: str, measurement: Measurement | None = None, numbers: str = "", longest: int = LONGEST) -> str:
    """Return a network as a legend shows it: its name, escaped and cut, whether it has converged, and some numbers.

    These are on a second line, for a phone.
    """
    half = longest // 2
    cut = name if len(name) <= longest else f"{name[: half - 1]}…{name[-half:]}"
    unfinished = measurement is not None and measurement.status == "not_converged"
    return escape_plotly(cut) + (" (not converged)" if unfinished else "") + (f"<br>{numbers}" if numbers else "")


def unique_ticks(names: Sequence[str], longest: int = PANEL_LONGEST) -> list[str]:
    """Return names for a category axis, escaped, cut, and numbered where cutting makes them equal.

    Example:
        >>> unique_ticks(["a<b", "x" * 30, "x" * 31], longest=6)
        ['a&lt;b', 'xx…xxx', 'xx…xxx (2)']
    """
    cut = [label(name, longest=longest) for name in names]
    return [
        text if text not in cut[:place] else f"{text} ({cut[:place].count(text) + 1})" for place, text in enumerate(cut)
    ]


def format_short(value: float, form: str = ".3g") -> str:
    """Return a number in a few characters: 0.0123, 12.3, 12,345."""
    return f"{value:,.0f}" if form == ".3g" and 1000 <= abs(value) < 1e6 else f"{value:{form}}"


def format_scalar(scalar: Scalar | None, form: str = ".3g") -> str:
    """Return a scalar with its interval, `3.2 [2.9, 3.5]`, or its bound where the interval is open."""
    if scalar is None:
        return "unknown"
    if scalar.low is None or scalar.high is None or math.isnan(scalar.low) or math.isnan(scalar.high):
        return format_short(scalar.value, form)
    if math.isinf(scalar.high):
        return f"at least {format_short(scalar.low, form)}"
    return f"{format_short(scalar.value, form)} [{format_short(scalar.low, form)}, {format_short(scalar.high, form)}]"


def finite(values: ArrayLike) -> Floats:
    """Return the numbers with NaN, a gap, where one is not finite."""
    numbers = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def is_wide(values: ArrayLike) -> bool:
    """Tell whether numbers need a logarithmic axis: all are positive, and the largest is many times the smallest."""
    numbers = finite(values)
    known = numbers[~np.isnan(numbers)]
    return bool(known.size) and bool((known > 0).all()) and bool(known.max() > WIDE * known.min())


def scale_for(values: ArrayLike, title: str, to_zero: bool = False) -> dict[str, Any]:
    """Return the settings of an axis for these values: title, logarithmic or not, from zero or not."""
    if not is_wide(values):
        return {"title_text": title, "type": "linear", "rangemode": "tozero" if to_zero else "normal"}
    orders = float(np.ptp(np.log10(finite(values)[np.isfinite(finite(values))])))
    return {
        **{"title_text": f"{title} (log)", "type": "log", "exponentformat": "power"},
        "dtick": "D2" if orders < 2 else 1 if orders < 8 else 2,
    }


def line_style(place: int) -> dict[str, Any]:
    """Return colour and dash of the network at this place of the report."""
    return {"color": network_colour(place), "dash": DASHES[place % len(DASHES)], "width": 2}


def marker_style(place: int, size: int = 7) -> dict[str, Any]:
    """Return colour and symbol of the network at this place of the report."""
    return {"color": network_colour(place), "symbol": MARKERS[place % len(MARKERS)], "size": size}


def trace_group(place: int, label: str, shown: bool = True) -> dict[str, Any]:
    """Return what all traces of one network share, so that one entry of the legend switches them together."""
    return {"name": label, "legendgroup": str(place), "showlegend": shown}


def line(place: int, label: str, x: ArrayLike, y: ArrayLike, shown: bool = True, **options: Any) -> go.Scatter:
    """Return a network's line, with markers."""
    style = {"mode": "lines+markers", "line": line_style(place), "marker": marker_style(place)}
    return go.Scatter(x=finite(x), y=finite(y), **trace_group(place, label, shown), **(style | options))


def band(place: int, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> go.Scatter:
    """Return the area between two curves in the network's colour, with a gap wherever one of them has one."""
    across, below, above = finite(x), finite(low), finite(high)
    known = ~(np.isnan(below) | np.isnan(above))
    outline: list[tuple[float, float]] = []
    for run in np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1):
        if len(run) and known[run[0]]:
            back = run[::-1]
            outline += [*zip(across[run], above[run], strict=True), *zip(across[back], below[back], strict=True)]
            outline.append((math.nan, math.nan))
    xs, ys = np.array(outline[:-1]).T if outline else (np.zeros(0), np.zeros(0))
    return go.Scatter(
        x=xs,
        y=ys,
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=with_opacity(place, 0.18),
        hoverinfo="skip",
        legendgroup=str(place),
        showlegend=False,
    )


def error_bars(values: ArrayLike, low: ArrayLike, high: ArrayLike, place: int | None = None) -> dict[str, Any]:
    """Return plotly's error bars from the ends of intervals; none where an end is not known."""
    middle, below, above = finite(values), finite(low), finite(high)
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.maximum(above - middle, 0)),
        "arrayminus": np.nan_to_num(np.maximum(middle - below, 0)),
        "thickness": 1.5,
        "width": 4,
        "color": GREY if place is None else network_colour(place),
    }


def ends(scalars: Sequence[Scalar | None]) -> tuple[Floats, Floats, Floats]:
    """Return values, lower and upper ends of some scalars, NaN where there is none."""
    rows = [
        (math.nan,) * 3 if s is None else (s.value, *(math.nan if e is None else e for e in (s.low, s.high)))
        for s in scalars
    ]
    values, low, high = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return values, low, high


Measurements = Sequence[tuple[int, str, Measurement]]
"""Place, name and measurement of each network, as `measured` returns them."""

COLUMNS = ("network", "measure", "value", "low", "high", "n")


def select_known(found: Measurements, groups: Mapping[str, str]) -> dict[str, str]:
    """Return those of the scalars, with their titles, that some network has."""
    return {key: title for key, title in groups.items() if any(key in one.scalars for _, _, one in found)}


def scalar_table(found: Measurements, groups: Mapping[str, str]) -> Table:
    """Return the scalars of these names with their intervals, as a table."""
    rows = [
        (name, key, one.scalars[key].value, one.scalars[key].low, one.scalars[key].high, one.scalars[key].n)
        for _, name, one in found
        for key in groups
        if key in one.scalars
    ]
    return Table(COLUMNS, rows)


def compare_scalars(found: Measurements, groups: Mapping[str, str], axis: str, share: bool = False) -> go.Figure:
    """Draw the scalars named by `groups` (with the titles of their rows), a bar a network.

    `axis` is the title of the values' axis; a `share` is shown in percent.
    """
    scalars = [[one.scalars.get(key) for key in groups] for _, _, one in found]
    everything = np.concatenate([np.concatenate(ends(row)) for row in scalars])
    log = not share and is_wide(everything)
    figure = make_canvas(64 + len(groups) * (12 + 20 * len(found)), legend=len(found))
    titles = list(groups.values())
    for (place, name, one), row in zip(found, scalars, strict=True):
        if log:
            figure.add_trace(points(place, label(name, one), titles, row))
        else:
            figure.add_traces(bars(place, label(name, one), titles, row, ".1%" if share else ".3g"))
    figure.update_xaxes(**({"title_text": axis, "tickformat": ".0%"} if share else scale_for(everything, axis)))
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(scattermode="group", bargap=0.25, scattergap=0.25)
    return figure


def bars(
    place: int, text: str, titles: Sequence[str], scalars: Sequence[Scalar | None], form: str, shown: bool = True
) -> list[go.Bar | go.Scatter]:
    """Return a network's bars, light enough for error bars to be seen, and the values as text in the page's colour."""
    values, low, high = ends(scalars)
    one = {"y": titles, "orientation": "h", "offsetgroup": str(place)}
    bar = go.Bar(
        x=finite(values),
        error_x=error_bars(values, low, high, place),
        marker={"color": with_opacity(place, 0.45), "line": {"color": network_colour(place), "width": 1.5}},
        hovertemplate=f"%{{y}}: %{{x:{form}}}",
        **one,
        **trace_group(place, text, shown),
    )
    written = go.Scatter(
        x=np.minimum(np.nan_to_num(finite(values)), 0.0),
        mode="text",
        text=["" if scalar is None else f" {format_short(scalar.value, form)}" for scalar in scalars],
        textposition="middle right",
        hoverinfo="skip",
        **one,
        **trace_group(place, text, shown=False),
    )
    return [bar, written]


def points(place: int, text: str, titles: Sequence[str], scalars: Sequence[Scalar | None]) -> go.Scatter:
    """Return a network's values as points, for axes that have no zero."""
    values, low, high = ends(scalars)
    return go.Scatter(
        x=finite(values),
        y=titles,
        orientation="h",
        offsetgroup=str(place),
        mode="markers",
        marker=marker_style(place, 9),
        error_x=error_bars(values, low, high, place),
        hovertemplate="%{y}: %{x:.4g}",
        **trace_group(place, text),
    )
