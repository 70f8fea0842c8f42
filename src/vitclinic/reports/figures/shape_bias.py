"""Shape or texture, class by class."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic.reports.colours import of_network
from vitclinic.reports.contents import Examined
from vitclinic.reports.escaping import plain
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import Measured, scalar_table
from vitclinic.reports.figures.drawing import (
    GREY,
    canvas,
    ends,
    error_bars,
    finite,
    label,
    marker_style,
    number,
    of_one,
)

_PREFIX = "shape_bias_"


@draws("shape_bias")
def shape_bias(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "shape_bias")
    classes = {key: key.removeprefix(_PREFIX) for _, _, one in found for key in one.scalars if key.startswith(_PREFIX)}
    if not classes:
        return []
    everything = {"shape_bias": "", "shape_decisions": "", "texture_decisions": "", **classes}
    return [
        Figure(
            name="shape-bias",
            title="Shape or texture",
            reading="Images have the shape of one class and the texture of another; a point is, of the decisions for"
            " either, the share for the shape, by the class of the shape, with its 95% interval. The vertical line is"
            " the network's share over all classes: right of the middle it goes by shape, left by texture.",
            paper="Geirhos et al. 2019, Fig. 4; Park and Kim 2022, Sec. 3",
            table=scalar_table(found, everything),
            plot=_plot(found, classes),
        )
    ]


def _plot(found: Measured, classes: dict[str, str]) -> go.Figure:
    figure = canvas(70 + len(classes) * (14 + 9 * len(found)), legend=2 * len(found))
    for place, name, one in found:
        values, low, high = ends([one.scalars.get(key) for key in classes])
        overall = one.scalars.get("shape_bias")
        figure.add_trace(
            go.Scatter(
                x=finite(values),
                y=[plain(title) for title in classes.values()],
                orientation="h",
                offsetgroup=str(place),
                mode="markers",
                marker=marker_style(place, 8),
                error_x=error_bars(values, low, high, place),
                hovertemplate="%{y}: %{x:.1%}",
                **of_one(place, label(name, one, number(overall, ".0%"))),
            )
        )
        if overall is not None:
            figure.add_vline(x=overall.value, line={"color": of_network(place), "width": 1.5})
    figure.add_vline(x=0.5, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="decisions for the shape", range=[-0.02, 1.02])
    figure.update_xaxes(tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(scattermode="group")
    return figure
