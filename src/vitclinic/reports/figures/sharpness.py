"""Sharpness (Hessian eigenvalues by component and block, trace, density), and the loss under noise on the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, network_colour, select_usable, with_opacity
from vitclinic.reports.figures.canvas import (
    COLUMNS,
    Floats,
    Measurements,
    compare_scalars,
    ends,
    error_bars,
    finite,
    format_scalar,
    label,
    line,
    line_style,
    make_canvas,
    scalar_table,
    scale_for,
    select_known,
    trace_group,
)

_COMPONENTS = {
    "lambda_max": "whole network",
    "lambda_max_embedding": "embedding",
    "lambda_max_position": "positions",
    "lambda_max_msa": "MSAs",
    "lambda_max_token_mlp": "token MLPs",
    "lambda_max_mlp": "MLPs",
    "lambda_max_conv": "Convs",
}
_PAPER = "Chen et al. 2022, Table 4 (C1, C4)"
_POINTS = 400
_SMALLEST = 1e-8
"""The least density that is drawn, as a share of the highest."""


@draws("sharpness")
def sharpness(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw eigenvalues by component and by block, the trace, and the density of all eigenvalues."""
    found = select_usable(exams, "sharpness")
    in_blocks = [each for each in found if any("lambda_max" in unit.values for unit in each[2].units)]
    with_density = [each for each in found if {"density_nodes", "density_weights"} <= each[2].arrays.keys()]
    figures = [
        *(_components(found) if select_known(found, _COMPONENTS) else []),
        *(_blocks(in_blocks) if in_blocks else []),
        *(_trace(found) if select_known(found, {"trace": ""}) else []),
        *(_density(with_density) if with_density else []),
    ]
    return figures


def _components(found: Measurements) -> list[Figure]:
    groups = select_known(found, _COMPONENTS)
    return [
        Figure(
            name="sharpness-components",
            title="Sharpness, whole and by component",
            reading="The largest eigenvalue of the Hessian of the training loss, of all weights and of the weights of"
            " one kind of component alone; smaller is flatter. Its interval is the error of the iteration, often too"
            " small to be seen; a negative value says that the steepest curvature bends down, and there is no minimum.",
            paper=_PAPER,
            table=scalar_table(found, {**groups, "loss": ""}),
            plot=compare_scalars(found, groups, "largest eigenvalue λ<sub>max</sub>"),
        )
    ]


def _blocks(found: Measurements) -> list[Figure]:
    figure = make_canvas(340, legend=len(found))
    rows, everything = [], []
    for place, name, one in found:
        units = [unit for unit in one.units if "lambda_max" in unit.values]
        values, low, high = ends([unit.values["lambda_max"] for unit in units])
        curve = line(
            place,
            label(name, one),
            np.arange(1, len(units) + 1),
            values,
            error_y=error_bars(values, low, high, place),
            hovertemplate="block %{x}: %{y:.4g}",
        )
        figure.add_trace(curve)
        everything += values.tolist()
        rows += [(name, unit.name, *row, None) for unit, *row in zip(units, values, low, high, strict=True)]
        if "lambda_max" in one.scalars:
            whole = one.scalars["lambda_max"]
            figure.add_hline(y=whole.value, line={"color": network_colour(place), "width": 1, "dash": "dot"})
            everything.append(whole.value)
            rows.append((name, "whole network", whole.value, whole.low, whole.high, whole.n))
    figure.update_xaxes(title_text="block", rangemode="tozero", tickformat="d")
    figure.update_yaxes(**scale_for(everything, "largest eigenvalue λ<sub>max</sub>", to_zero=True))
    return [
        Figure(
            name="sharpness-blocks",
            title="Sharpness by depth",
            reading="The largest eigenvalue of the Hessian over the weights of one block alone, from the first block to"
            " the last; the dotted line is that of the whole network. The paper finds the lower blocks sharper.",
            paper=_PAPER,
            table=Table(COLUMNS, rows),
            plot=figure,
        )
    ]


def _trace(found: Measurements) -> list[Figure]:
    groups = {"trace": "trace"}
    return [
        Figure(
            name="sharpness-trace",
            title="Trace of the Hessian",
            reading="The sum of all eigenvalues, estimated with random vectors, with its 95% interval. Where the"
            " largest eigenvalue is the curvature in the steepest direction, the trace is that in all together:"
            " smaller is flatter.",
            paper="Chen et al. 2022, App. F (C1)",
            table=scalar_table(found, groups),
            plot=compare_scalars(found, groups, "trace of the Hessian"),
        )
    ]


def _density(found: Measurements) -> list[Figure]:
    figure = make_canvas(340, legend=len(found))
    rows = []
    rules = {place: _known(one) for place, _, one in found}
    nodes = np.concatenate([places for places, _ in rules.values()])
    if not nodes.size:
        return []
    width = 0.01 * float(np.ptp(nodes)) or 1.0
    across = np.linspace(nodes.min() - 4 * width, nodes.max() + 4 * width, _POINTS)
    for place, name, one in found:
        places, weights = rules[place]
        density = smooth_density(across, places, weights, width)
        figure.add_trace(
            go.Scatter(
                x=across,
                y=np.where(density > _SMALLEST * density.max(initial=0), density, np.nan),
                mode="lines",
                line=line_style(place),
                hovertemplate="eigenvalue %{x:.3g}: density %{y:.2g}",
                **trace_group(place, label(name, one)),
            )
        )
        rows += [(name, *row) for row in zip(places.tolist(), weights.tolist(), strict=True)]
    figure.update_xaxes(title_text="eigenvalue")
    figure.update_yaxes(title_text="density (log)", type="log", exponentformat="power", dtick=2)
    return [
        Figure(
            name="sharpness-density",
            title="Density of all Hessian eigenvalues",
            reading="How the eigenvalues of the whole Hessian are distributed, each node of the estimate drawn a"
            f" little wide (a standard deviation of {width:.2g}), on a logarithmic axis: nearly all are near zero."
            " Bumps far to the right are the few sharp directions, anything left of zero is curvature that bends down.",
            paper="after Ghorbani et al. 2019; Chen et al. 2022, App. F",
            table=Table(("network", "node", "weight"), rows),
            plot=figure,
        )
    ]


def _known(measurement: Measurement) -> tuple[Floats, Floats]:
    """Return nodes and weights of the density, as far as they are finite."""
    nodes, weights = measurement.arrays["density_nodes"], measurement.arrays["density_weights"]
    known = np.isfinite(nodes) & np.isfinite(weights)
    return nodes[known], weights[known]


def smooth_density(x: Floats, nodes: Floats, weights: Floats, width: float) -> Floats:
    """Return the density of Gaussians of these weights at the nodes."""
    away = (x[:, None] - nodes[None]) / width
    density: Floats = np.exp(-0.5 * away**2) @ weights / (width * np.sqrt(2 * np.pi))
    return density


_SCALARS = {"flatness": "", "loss": "", "sigma": "", "standard_error": ""}


@draws("flatness")
def flatness(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the losses under noise as boxes."""
    found = [each for each in select_usable(exams, "flatness") if "losses" in each[2].arrays]
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


def _plot(found: Measurements) -> go.Figure:
    figure = make_canvas(340, legend=2 * len(found))
    everything = []
    for place, name, one in found:
        losses, alone = finite(one.arrays["losses"]), one.scalars.get("loss")
        sigma = one.scalars.get("sigma")
        text = f"L<sup>N</sup> {format_scalar(one.scalars.get('flatness'))}" + (
            f", σ = {sigma.value:g}" if sigma else ""
        )
        figure.add_trace(
            go.Box(
                x=np.full(len(losses), place),
                y=losses,
                boxpoints="all",
                jitter=0.6,
                pointpos=0,
                marker={"color": network_colour(place), "size": 4, "opacity": 0.6},
                line={"color": network_colour(place), "width": 1.5},
                fillcolor=with_opacity(place, 0.15),
                hovertemplate="loss %{y:.4g}",
                **trace_group(place, label(name, one, text)),
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
                    marker={"color": network_colour(place), "symbol": "diamond-open", "size": 12, "line": {"width": 2}},
                    hovertemplate="loss without noise %{y:.4g}",
                    **trace_group(place, label(name, one, text), shown=False),
                )
            )
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False, type="category")
    figure.update_yaxes(**scale_for(everything, "loss, nats"))
    return figure
