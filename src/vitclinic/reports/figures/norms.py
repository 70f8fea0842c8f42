"""Norms of the weights of each unit, and of the activations after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured
from vitclinic.reports.figures.drawing import band, canvas, ends, label, line, number, scale_for

_PANELS = {"weight_norm": "norm of the unit's weights", "activation_norm": "norm of the state after it"}


@draws("norms")
def norms(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "norms") if each[2].units]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        rows += [(name, "", key, *_whole(scalar)) for key, scalar in one.scalars.items()]
        rows += [(name, u.name, key, *_whole(scalar)) for u in one.units for key, scalar in u.values.items()]
    return [
        Figure(
            name="norms",
            title="Norms of weights and activations by depth",
            reading="From the input (left) to the output (right), a point for each unit: above, the l₂ norm of its"
            " weights; below, that of the state after it, mean over images with its 95% interval. The paper finds both"
            " mostly larger after sharpness-aware training; compare networks of one architecture and image size.",
            paper="Chen et al. 2022, Table 4 (C5)",
            table=Table(("network", "unit", "measure", "value", "low", "high", "n"), rows),
            plot=_plot(found),
        )
    ]


def _whole(scalar: object) -> tuple[object, ...]:
    return tuple(getattr(scalar, key) for key in ("value", "low", "high", "n"))


def _plot(found: Measured) -> go.Figure:
    figure = canvas(520, 2, legend=2 * len(found), shared_xaxes=True, vertical_spacing=0.06)
    for row, (key, title) in enumerate(_PANELS.items(), start=1):
        everything: list[float] = []
        for place, name, one in found:
            units = [unit for unit in one.units if key in unit.values]
            values, low, high = ends([unit.values[key] for unit in units])
            depth = np.linspace(0, 1, len(units)) if len(units) > 1 else np.zeros(len(units))
            figure.add_trace(band(place, depth, low, high), row, 1)
            whole = one.scalars.get("weight_norm")
            text = label(name, one, f"|w| {number(whole)}")
            curve = line(
                place,
                text,
                depth,
                values,
                shown=row == 1,
                customdata=[f"{unit.kind}, depth {unit.depth}" for unit in units],
                hovertemplate="%{customdata}: %{y:.4g}",
            )
            figure.add_trace(curve, row, 1)
            everything += values.tolist()
        figure.update_yaxes(**scale_for(everything, title, to_zero=True), row=row, col=1)
    figure.update_xaxes(title_text="normalised depth", row=2, col=1)
    return figure
