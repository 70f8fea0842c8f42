"""Spectra of the Hessian over mini-batches (NEP, APE) and of the neural tangent kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable, with_opacity
from vitclinic.reports.figures.canvas import (
    Floats,
    Measurements,
    band,
    compare_scalars,
    finite,
    format_scalar,
    label,
    line,
    line_style,
    make_canvas,
    scalar_table,
    select_known,
    trace_group,
)

BINS = 24
"""Of each sign, over all networks."""


@draws("hessian_spectrum")
def hessian_spectrum(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the distribution of the top eigenvalues of all mini-batches."""
    found = [each for each in select_usable(exams, "hessian_spectrum") if "eigenvalues" in each[2].arrays]
    if not found:
        return []
    return [
        Figure(
            name="hessian-spectrum",
            title="Hessian max eigenvalue spectrum",
            reading="The share of the top eigenvalues of all mini-batches that lie in each range: those below zero"
            " left, where the loss is not convex, those above right, on an axis of their own. NEP is the share left of"
            " zero and APE the mean of those right of it; a lower NEP and a lower APE are better, and both compare only"
            " at one batch size, augmentation and weight decay.",
            paper="Park and Kim 2022, Fig. 1c, 4 (P1)",
            table=_eigenvalue_table(found, "batch"),
            plot=_plot(found),
        )
    ]


def _plot(found: Measurements) -> go.Figure:
    values = {place: _known(one.arrays["eigenvalues"]) for place, _, one in found}
    everything = np.concatenate(list(values.values()))
    sides = [side for side in (everything[everything < 0], everything[everything >= 0]) if side.size]
    titles = ["below zero" if (side < 0).all() else "above zero" for side in sides]
    figure = make_canvas(
        350, 1, max(1, len(sides)), titles, legend=2 * len(found), shared_yaxes=True, horizontal_spacing=0.04
    )
    for column, side in enumerate(sides, start=1):
        edges = _edges(side)
        for place, name, one in found:
            own = values[place]
            chosen = own[(own < 0) == bool(side[0] < 0)]
            shares = np.histogram(chosen, edges)[0] / max(1, own.size)
            nep, ape = one.scalars.get("nep"), one.scalars.get("ape")
            text = f"NEP {format_scalar(nep, '.0%')}" + ("" if ape is None else f", APE {format_scalar(ape)}")
            steps = go.Scatter(
                x=np.repeat(edges, 2),
                y=np.concatenate([[0], np.repeat(shares, 2), [0]]),
                mode="lines",
                line=line_style(place),
                fill="tozeroy",
                fillcolor=with_opacity(place, 0.15),
                hovertemplate="eigenvalue %{x:.3g}: %{y:.1%}",
                **trace_group(place, label(name, one, text), shown=column == 1),
            )
            figure.add_trace(steps, 1, column)
    figure.update_xaxes(title_text="eigenvalue", nticks=5)
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    figure.update_yaxes(title_text="share of the eigenvalues", row=1, col=1)
    return figure


def _known(values: Floats) -> Floats:
    flat: Floats = values[np.isfinite(values)]
    return flat


def _edges(side: Floats) -> Floats:
    """Return equal bins from zero to the farthest of these eigenvalues, all of one sign."""
    far = float(side[np.abs(side).argmax()]) or 1.0
    return np.linspace(min(far, 0.0), max(far, 0.0), BINS + 1)


_GROUPS = {"condition_number": "κ = λ<sub>1</sub> / λ<sub>m</sub>"}


@draws("ntk")
def ntk(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the condition number of the tangent kernel, and its spectrum."""
    found = select_usable(exams, "ntk")
    with_spectrum = [each for each in found if "eigenvalues" in each[2].arrays]
    return [
        *(_condition(found) if select_known(found, _GROUPS) else []),
        *(_spectrum(with_spectrum) if with_spectrum else []),
    ]


def _condition(found: Measurements) -> list[Figure]:
    return [
        Figure(
            name="ntk-condition",
            title="Condition number of the tangent kernel",
            reading="The largest eigenvalue of the neural tangent kernel over its smallest, mean over blocks of images"
            " with a 95% interval. Larger means that some directions are learnt far later than others; the paper's"
            " numbers are of networks at initialisation.",
            paper="Chen et al. 2022, Table 1 (C3)",
            table=scalar_table(found, {**_GROUPS, "lambda_1": "", "lambda_m": "", "block": ""}),
            plot=compare_scalars(found, _GROUPS, "condition number"),
        )
    ]


def _spectrum(found: Measurements) -> list[Figure]:
    figure = make_canvas(340, legend=2 * len(found))
    for place, name, one in found:
        ratios = _relative(one.arrays["eigenvalues"])
        rank = np.arange(1, ratios.shape[1] + 1)
        middle, low, high = np.exp(np.log(ratios).mean(0)), ratios.min(0), ratios.max(0)
        text = label(name, one, f"κ {format_scalar(one.scalars.get('condition_number'))}")
        figure.add_trace(band(place, rank, low, high))
        figure.add_trace(line(place, text, rank, middle, mode="lines", hovertemplate="eigenvalue %{x}: %{y:.2g}"))
    figure.update_xaxes(title_text="number of the eigenvalue, from the largest")
    figure.update_yaxes(title_text="λ<sub>k</sub> / λ<sub>1</sub> (log)", type="log", exponentformat="power", dtick=1)
    return [
        Figure(
            name="ntk-spectrum",
            title="Spectrum of the tangent kernel",
            reading="The eigenvalues of the tangent kernel as shares of the largest: the geometric mean over blocks of"
            " images, the band from the lowest to the highest block. The curve ends at one over the condition number:"
            " the farther it falls, the later the last directions are learnt.",
            paper="Chen et al. 2022, App. G (C3)",
            table=_eigenvalue_table(found, "block"),
            plot=figure,
        )
    ]


def _relative(eigenvalues: Floats) -> Floats:
    """Return eigenvalues as shares of each block's largest; what is not positive is a gap on a logarithmic axis."""
    values = finite(eigenvalues)
    positive: Floats = np.where(values > 0, values, np.nan)
    return positive / positive[:, :1]


def _eigenvalue_table(found: Measurements, part: str) -> Table:
    """Return all eigenvalues of each `part`, a batch or block of images, from the largest on."""
    rows = [
        (name, number, rank, value)
        for _, name, one in found
        for number, values in enumerate(one.arrays["eigenvalues"].tolist())
        for rank, value in enumerate(values, start=1)
    ]
    return Table(("network", part, "rank", "eigenvalue"), rows)
