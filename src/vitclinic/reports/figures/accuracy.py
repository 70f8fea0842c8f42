"""Reliability diagram: is the network right as often as it is sure?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.colours import of_network, with_opacity
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured
from vitclinic.reports.figures.drawing import GREY, canvas, error_bars, finite, label, line, number, of_one

_ARRAYS = ("bin_edges", "bin_images", "bin_confidence", "bin_accuracy", "bin_accuracy_low", "bin_accuracy_high")


@draws("accuracy")
def accuracy(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "accuracy") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        edges, *values = (one.arrays[array].tolist() for array in _ARRAYS)
        rows += [(name, *row) for row in zip(edges[:-1], edges[1:], *values, strict=True)]
    columns = ("network", "confidence_from", "confidence_to", *(array.removeprefix("bin_") for array in _ARRAYS[1:]))
    return [
        Figure(
            name="reliability",
            title="Reliability diagram",
            reading="Above, the accuracy of the images of each range of confidence, with 95% intervals, against their"
            " mean confidence; below, the share of the images in that range. A calibrated network is on the diagonal,"
            " an over-confident one below it; the ECE is the mean distance from it, over images.",
            paper="Park and Kim 2022, Fig. F.1a (P13); Guo et al. 2017",
            table=Table(columns, rows),
            plot=_plot(found),
        )
    ]


def _plot(found: Measured) -> go.Figure:
    figure = canvas(480, 2, legend=2 * len(found), shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.05)
    diagonal = go.Scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "dash": "dot"}, hoverinfo="skip", showlegend=False
    )
    figure.add_trace(diagonal, 1, 1)
    for place, name, one in found:
        edges, images, confidence, right, low, high = (one.arrays[array] for array in _ARRAYS)
        text = label(name, one, f"ECE {number(one.scalars.get('ece'), '.1%')}")
        curve = line(
            place,
            text,
            confidence,
            right,
            error_y=error_bars(right, low, high, place),
            connectgaps=True,
            hovertemplate="confidence %{x:.1%}, accuracy %{y:.1%}",
        )
        figure.add_trace(curve, 1, 1)
        shares = images / max(1, int(images.sum()))
        steps = go.Scatter(
            x=np.repeat(finite(edges), 2),
            y=np.concatenate([[0], np.repeat(shares, 2), [0]]),
            mode="lines",
            line={"color": of_network(place), "width": 1.5},
            fill="tozeroy",
            fillcolor=with_opacity(place, 0.15),
            hovertemplate="%{y:.1%} of the images",
            **of_one(place, text, shown=False),
        )
        figure.add_trace(steps, 2, 1)
    figure.update_xaxes(range=[-0.01, 1.02], tickformat=".0%")
    figure.update_xaxes(title_text="confidence", row=2, col=1)
    figure.update_yaxes(title_text="accuracy", tickformat=".0%", range=[-0.02, 1.04], row=1, col=1)
    figure.update_yaxes(title_text="images", tickformat=".0%", rangemode="tozero", row=2, col=1)
    return figure
