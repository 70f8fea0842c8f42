"""Similarity of the states after a network's units, as a matrix (CKA) [park2022 Fig. 10a, D.3]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement, UnitRow
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import CLEAR, PANEL_LONGEST, Floats, finite, label, make_canvas
from vitclinic.reports.figures.units import KIND_NAMES
from vitclinic.reports.formatting import escape_plotly
from vitclinic.reports.theme import KIND_MARKS, SEQUENTIAL

_SIDE = 320
"""Pixels of height of a row of matrices, with their titles."""
_BAR = {
    "title": {"text": "CKA&nbsp;&nbsp;", "side": "right"},
    "orientation": "h",
    "len": 0.5,
    "x": 0.5,
    "y": 1,
    "yref": "container",
    "yanchor": "top",
}
_BORDER = "rgba(255, 255, 255, 0.9)"

Matrices = Sequence[tuple[int, str, Measurement]]
Shape = dict[str, Any]


@draws("cka")
def cka(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw a matrix for each network, with the kinds of units along its axes."""
    found = [one for one in select_usable(exams, "cka") if _is_whole(one[2])]
    if not found:
        return []
    return [
        Figure(
            name="cka-units",
            title="Similarity of units",
            reading="Each cell is the CKA between the states after two units of one network, from 0 (nothing in"
            " common) to 1; the strips at the axes are the kinds of units, white lines part stages. Bright squares"
            " along the diagonal are stages that work on their own, which Park and Kim found in networks of several"
            " stages; a plain ViT changes evenly.",
            paper="Park and Kim 2022, Fig. 10a, D.3 (P9)",
            table=_table(found),
            plot=_plot(found),
        )
    ]


def _is_whole(one: Measurement) -> bool:
    """Tell whether the matrix is there, with a row for each unit."""
    matrix = one.arrays.get("cka")
    return matrix is not None and matrix.shape == (len(one.units), len(one.units)) and bool(one.units)


def _plot(found: Matrices) -> go.Figure:
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    kinds = [kind for kind in KIND_NAMES if any(unit.kind == kind for _, _, one in found for unit in one.units)]
    height = (_SIDE if len(found) > 1 else 400) * rows + 90
    titles = [label(name, one, longest=PANEL_LONGEST) for _, name, one in found] if len(found) > 1 else ()
    spacing = {"vertical_spacing": 90 / height, "horizontal_spacing": 0.08}
    plot = make_canvas(height, rows, columns, titles, legend=-(-len(kinds) // 2), **spacing)
    shapes = []
    for number, (_, _, one) in enumerate(found):
        shapes += _matrix(plot, number // columns + 1, number % columns + 1, one)
    plot.update_layout(shapes=shapes)  # at once: one after another takes seconds
    plot.update_xaxes(title_text="unit")
    plot.update_yaxes(title_text="unit", col=1)
    for kind in kinds:
        mark = {"color": KIND_MARKS[kind], "symbol": "square", "size": 10}
        plot.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=mark, name=KIND_NAMES[kind]))
    everything = np.concatenate([finite(one.arrays["cka"]).ravel() for _, _, one in found])
    lowest = float(np.nanmin(everything, initial=0.0))
    plot.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": lowest, "cmax": 1, "colorbar": _BAR}, margin_t=90)
    return plot


def _matrix(plot: go.Figure, row: int, column: int, one: Measurement) -> list[Shape]:
    """Draw one network's matrix, and return the shapes that belong on it."""
    units = one.units
    names = [
        f"{number} {escape_plotly(unit.name)}" for number, unit in enumerate(units)
    ]  # numbered: categories are unique
    cells = go.Heatmap(
        x=names,
        y=names,
        z=finite(one.arrays["cka"]),
        coloraxis="coloraxis",
        hovertemplate="%{x}<br>%{y}<br>CKA %{z:.3f}<extra></extra>",
    )
    plot.add_trace(cells, row, column)
    thickness = 0.045 * len(units)
    shown = list(range(0, len(units), -(-len(units) // 8)))
    axis = {
        "type": "category",
        "range": [-0.5 - 1.3 * thickness, len(units) - 0.5],
        "showgrid": False,
        "showline": False,
    }
    axis |= {"tickvals": shown, "ticktext": [str(number) for number in shown], "constrain": "domain"}
    plot.update_xaxes(**axis, row=row, col=column)
    plot.update_yaxes(**axis, row=row, col=column)
    axes = {"xref": plot.data[-1].xaxis, "yref": plot.data[-1].yaxis}
    plot.update_yaxes(scaleanchor=axes["xref"], constraintoward="top", row=row, col=column)
    return [axes | shape for shape in (*_strips(units, thickness), *_borders(units))]


def _strips(units: Sequence[UnitRow], thickness: float) -> Iterator[Shape]:
    """Yield the kinds of units along both axes."""
    outer, inner = -0.5 - 1.3 * thickness, -0.5 - 0.3 * thickness
    for number, unit in enumerate(units):
        style = {"type": "rect", "fillcolor": KIND_MARKS.get(unit.kind, CLEAR), "line": {"width": 0}}
        start, end = number - 0.46, number + 0.46
        yield {"x0": start, "x1": end, "y0": outer, "y1": inner, **style}
        yield {"x0": outer, "x1": inner, "y0": start, "y1": end, **style}


def _borders(units: Sequence[UnitRow]) -> Iterator[Shape]:
    """Yield lines between stages."""
    first, last = -0.5, len(units) - 0.5
    style = {"type": "line", "line": {"color": _BORDER, "width": 1.5}}
    for number, (one, other) in enumerate(pairwise(units)):
        if one.stage != other.stage:
            yield {"x0": number + 0.5, "x1": number + 0.5, "y0": first, "y1": last, **style}
            yield {"x0": first, "x1": last, "y0": number + 0.5, "y1": number + 0.5, **style}


def _table(found: Matrices) -> Table:
    rows = []
    for _, name, one in found:
        matrix: Floats = np.asarray(one.arrays["cka"], dtype=np.float64)
        for first, values in zip(one.units, matrix, strict=True):
            for second, value in zip(one.units, values, strict=True):
                rows.append((name, first.name, first.kind, second.name, second.kind, float(value)))
    return Table(("network", "unit", "kind", "other unit", "other kind", "cka"), rows)
