"""The course of a training around its end, in polar coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured
from vitclinic.reports.figures.drawing import canvas, finite, label, line_style, marker_style, of_one

_ARRAYS = ("epoch", "radius", "angle", "radius_error", "angle_error")


@draws("trajectory")
def trajectory(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "trajectory") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        rows += [(name, *row) for row in zip(*(one.arrays[array].tolist() for array in _ARRAYS), strict=True)]
    return [
        Figure(
            name="trajectory",
            title="Course of the training",
            reading="The weights after each kept epoch, seen from where the training ended, in the middle: how far they"
            " still are, as a share of the whole way, and in which direction, against that of the start, at radius 1"
            " and angle 0. A straight path keeps its angle at 0; each network has axes of its own.",
            paper="Park and Kim 2022, Fig. 1b (P15)",
            table=Table(("network", *_ARRAYS), rows),
            plot=_plot(found),
        )
    ]


def _plot(found: Measured) -> go.Figure:
    figure = canvas(400, legend=2 * len(found), specs=[[{"type": "polar"}]])
    farthest, widest = 1.0, 0.0
    for place, name, one in found:
        epoch, radius, angle = (finite(one.arrays[array]) for array in _ARRAYS[:3])
        path = go.Scatterpolar(
            r=[*radius, 0.0],
            theta=np.degrees([*angle, angle[-1] if len(angle) else 0.0]),
            customdata=[*(f"epoch {at:g}" for at in epoch), "end"],
            mode="lines+markers",
            line=line_style(place),
            marker=marker_style(place),
            hovertemplate="%{customdata}: r %{r:.3f}, %{theta:.1f}°",
            **of_one(place, label(name, one, f"largest angle {_degrees(one.scalars.get('angle_max'))}")),
        )
        figure.add_trace(path)
        farthest = max(farthest, float(np.nanmax(radius, initial=0)))
        widest = max(widest, float(np.nanmax(np.degrees(angle), initial=0)))
    figure.update_layout(margin={"l": 44, "r": 44, "t": 34})  # the labels of the angles are outside
    figure.update_polars(
        sector=[0, 90 if widest <= 90 else 180],
        radialaxis={"range": [0, 1.05 * farthest], "title": {"text": "distance r"}, "angle": 0, "tickangle": 0},
        angularaxis={"ticksuffix": "°", "dtick": 15},
    )
    return figure


def _degrees(scalar: object) -> str:
    value = getattr(scalar, "value", None)
    return "unknown" if value is None else f"{np.degrees(value):.0f}°"
