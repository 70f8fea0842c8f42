"""Size and speed of a network (cost), and norms of its weights and activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import band, ends, format_scalar, label, line, make_canvas, scale_for
from vitclinic.reports.figures.scalars import Measurements, bars, scalar_table, select_known

_GROUPS = {
    "parameters": "parameters, millions",
    "flops": "GFLOPs per image",
    "images_per_second": "images per second",
    "latency_seconds": "latency of one image, ms",
    "peak_memory_bytes": "peak memory, MiB",
}
_UNITS = {"parameters": 1e6, "flops": 1e9, "latency_seconds": 1e-3, "peak_memory_bytes": 2.0**20}


@draws("cost")
def cost(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw parameters, operations, speed and memory of a forward pass."""
    found = select_usable(exams, "cost")
    groups = select_known(found, _GROUPS)
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


def _panels(found: Measurements, groups: dict[str, str]) -> go.Figure:
    height = 40 + len(groups) * (60 + 20 * len(found))
    figure = make_canvas(height, len(groups), legend=len(found), vertical_spacing=60 / height)
    for row, (key, title) in enumerate(groups.items(), start=1):
        for place, name, one in found:
            scalar = _scale(one.scalars.get(key), _UNITS.get(key, 1.0))
            for trace in bars(place, label(name, one), [str(place)], [scalar], ".3g", shown=row == 1):
                figure.add_trace(trace, row, 1)
        figure.update_xaxes(title_text=title, row=row, col=1)
    figure.update_traces(offsetgroup=None)  # a row of its own for each network
    figure.update_yaxes(autorange="reversed", showgrid=False, showticklabels=False, ticks="", type="category")
    figure.update_layout(bargap=0.15, barmode="overlay")
    return figure


def _scale(scalar: Scalar | None, unit: float) -> Scalar | None:
    if scalar is None:
        return None
    low, high = (None if end is None else end / unit for end in (scalar.low, scalar.high))
    return Scalar(value=scalar.value / unit, low=low, high=high, n=scalar.n)


_PANELS = {"weight_norm": "norm of the unit's weights", "activation_norm": "norm of the state after it"}


@draws("norms")
def norms(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw norms of weights and activations by depth."""
    found = [each for each in select_usable(exams, "norms") if each[2].units]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        rows += [(name, "", key, *_list_fields(scalar)) for key, scalar in one.scalars.items()]
        rows += [(name, u.name, key, *_list_fields(scalar)) for u in one.units for key, scalar in u.values.items()]
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


def _list_fields(scalar: object) -> tuple[object, ...]:
    return tuple(getattr(scalar, key) for key in ("value", "low", "high", "n"))


def _plot(found: Measurements) -> go.Figure:
    figure = make_canvas(520, 2, legend=2 * len(found), shared_xaxes=True, vertical_spacing=0.06)
    for row, (key, title) in enumerate(_PANELS.items(), start=1):
        everything: list[float] = []
        for place, name, one in found:
            units = [unit for unit in one.units if key in unit.values]
            values, low, high = ends([unit.values[key] for unit in units])
            depth = np.linspace(0, 1, len(units)) if len(units) > 1 else np.zeros(len(units))
            figure.add_trace(band(place, depth, low, high), row, 1)
            whole = one.scalars.get("weight_norm")
            text = label(name, one, f"|w| {format_scalar(whole)}")
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
