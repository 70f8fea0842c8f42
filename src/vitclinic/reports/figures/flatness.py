"""The loss of weights with noise on them, draw by draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.colours import of_network, with_opacity
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import COLUMNS, Measured, scalar_table
from vitclinic.reports.figures.drawing import canvas, finite, label, number, of_one, scale_for

_SCALARS = {"flatness": "", "loss": "", "sigma": "", "standard_error": ""}


@draws("flatness")
def flatness(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "flatness") if "losses" in each[2].arrays]
    if not found:
        return []
    drawn = [
        (name, f"draw {number}", loss, None, None, None)
        for _, name, one in found
        for number, loss in enumerate(one.arrays["losses"].tolist(), start=1)
    ]
    return [
        Figure(
            name="flatness",
            title="Loss with noise on the weights",
            reading="Each point is the loss after one draw of noise on all weights, the box their quartiles, and the"
            " diamond the loss of the network itself, without noise. The farther the box is above its diamond, the"
            " sharper the minimum; compare only networks measured with the same sigma.",
            paper="Chen et al. 2022, Table 1 (C1)",
            table=Table(COLUMNS, [*scalar_table(found, _SCALARS).rows, *drawn]),
            plot=_plot(found),
        )
    ]


def _plot(found: Measured) -> go.Figure:
    figure = canvas(340, legend=2 * len(found))
    everything = []
    for place, name, one in found:
        losses, alone = finite(one.arrays["losses"]), one.scalars.get("loss")
        sigma = one.scalars.get("sigma")
        text = f"L<sup>N</sup> {number(one.scalars.get('flatness'))}" + (f", σ = {sigma.value:g}" if sigma else "")
        figure.add_trace(
            go.Box(
                x=np.full(len(losses), place),
                y=losses,
                boxpoints="all",
                jitter=0.6,
                pointpos=0,
                marker={"color": of_network(place), "size": 4, "opacity": 0.6},
                line={"color": of_network(place), "width": 1.5},
                fillcolor=with_opacity(place, 0.15),
                hovertemplate="loss %{y:.4g}",
                **of_one(place, label(name, one, text)),
            )
        )
        everything += losses.tolist()
        if alone is not None:
            everything.append(alone.value)
            figure.add_trace(
                go.Scatter(
                    x=[place],
                    y=finite([alone.value]),
                    mode="markers",
                    marker={"color": of_network(place), "symbol": "diamond-open", "size": 12, "line": {"width": 2}},
                    hovertemplate="loss without noise %{y:.4g}",
                    **of_one(place, label(name, one, text), shown=False),
                )
            )
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False, type="category")
    figure.update_yaxes(**scale_for(everything, "loss, nats"))
    return figure
