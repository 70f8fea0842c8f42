"""Parameters, operations, speed and memory of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic.measurement import Scalar
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import Measured, bars, known, scalar_table
from vitclinic.reports.figures.drawing import canvas, label

_GROUPS = {
    "parameters": "parameters, millions",
    "flops": "GFLOPs per image",
    "images_per_second": "images per second",
    "latency_seconds": "latency of one image, ms",
    "peak_memory_bytes": "peak memory, MiB",
}
_UNITS = {"parameters": 1e6, "flops": 1e9, "latency_seconds": 1e-3, "peak_memory_bytes": 2.0**20}


@draws("cost")
def cost(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "cost")
    groups = known(found, _GROUPS)
    if not groups:
        return []
    return [
        Figure(
            name="cost",
            title="What a forward pass takes",
            reading="A bar a network and a panel a quantity, each with a scale of its own; times are medians with their"
            " 95% intervals. Compare speeds only of networks examined on the same machine, and on an idle one.",
            paper="Park and Kim 2022, Fig. 12 (P11)",
            table=scalar_table(found, {**groups, "batch": ""}),
            plot=_panels(found, groups),
        )
    ]


def _panels(found: Measured, groups: dict[str, str]) -> go.Figure:
    height = 40 + len(groups) * (60 + 20 * len(found))
    figure = canvas(height, len(groups), legend=len(found), vertical_spacing=60 / height)
    for row, (key, title) in enumerate(groups.items(), start=1):
        for place, name, one in found:
            scalar = _scaled(one.scalars.get(key), _UNITS.get(key, 1.0))
            for trace in bars(place, label(name, one), [str(place)], [scalar], ".3g", shown=row == 1):
                figure.add_trace(trace, row, 1)
        figure.update_xaxes(title_text=title, row=row, col=1)
    figure.update_traces(offsetgroup=None)  # a row of its own for each network
    figure.update_yaxes(autorange="reversed", showgrid=False, showticklabels=False, ticks="", type="category")
    figure.update_layout(bargap=0.15, barmode="overlay")
    return figure


def _scaled(scalar: Scalar | None, unit: float) -> Scalar | None:
    if scalar is None:
        return None
    low, high = (None if end is None else end / unit for end in (scalar.low, scalar.high))
    return Scalar(value=scalar.value / unit, low=low, high=high, n=scalar.n)
