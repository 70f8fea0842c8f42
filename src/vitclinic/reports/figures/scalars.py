"""Scalars of several networks side by side: bars from zero, or points where a logarithmic axis has no zero.

Bars are horizontal, so that names have room beside them on a phone, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement, Scalar
from vitclinic.reports.figure import Table
from vitclinic.reports.figures.canvas import (
    ends,
    error_bars,
    finite,
    format_short,
    is_wide,
    label,
    make_canvas,
    marker_style,
    scale_for,
    trace_group,
)
from vitclinic.reports.theme import network_colour, with_opacity

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
