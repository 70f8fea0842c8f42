"""States after a network's units: their similarity (CKA) and their high frequencies [park2022 Fig. 2a, 8, 10a, D.3].

Similarity is a matrix. High frequencies of feature maps are drawn by depth, as change across units, and as curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from vitclinic._core.records import Measurement, UnitRow
from vitclinic.reports.figure import (
    KIND_MARKS,
    SEQUENTIAL,
    ExamView,
    Figure,
    Table,
    draws,
    escape_plotly,
    select_usable,
)
from vitclinic.reports.figures.canvas import CLEAR, PANEL_LONGEST, Floats, finite, label, make_canvas
from vitclinic.reports.figures.depth import (
    KIND_NAMES,
    PANEL,
    collect_series,
    draw_shaded_bars,
    draw_shaded_lines,
    unit_names,
    unit_table,
)

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


_ENDS = (0.15, 0.88)
"""The part of the colour scale that units have: its first colours vanish on a dark page, its last on a white one."""
_NEEDED = ("frequencies", "delta_log_amplitude")


@draws("fourier")
def fourier(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw high frequencies by depth, their change across units, and the curves after all units."""
    return [*_by_depth(exams), *_changes(exams), *_curves(exams)]


def _by_depth(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "fourier", "delta_log_amplitude")
    if not found:
        return []
    return [
        Figure(
            name="fourier-depth",
            title="High frequencies by depth",
            reading="Each point is the log amplitude at the highest frequency relative to that at frequency zero,"
            " after a unit: the lower, the smoother the feature maps. The shade between two points is the unit that"
            " leads from one to the other; Park and Kim found that it falls across MSAs and rises across MLPs and"
            " convs, and dotted lines part stages, across which π is another frequency.",
            paper="Park and Kim 2022, Fig. 8, D.2 (P6)",
            table=unit_table(exams, "fourier", ["delta_log_amplitude"]),
            plot=draw_shaded_lines(found, "Δ log amplitude at π"),
        )
    ]


def _changes(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "fourier", "change")
    if not found:
        return []
    return [
        Figure(
            name="fourier-change",
            title="Change of high frequencies across each unit",
            reading="A bar below zero is a unit that lets high frequencies lose amplitude (a low-pass filter), one"
            " above zero a unit that amplifies them; whiskers are 95% intervals of paired differences over images."
            " Park and Kim expect MSAs below zero and MLPs and convs above, the first MSAs excepted.",
            paper="Park and Kim 2022, Fig. 8 (P6)",
            table=unit_table(exams, "fourier", ["change"]),
            plot=draw_shaded_bars(found, "change at π"),
        )
    ]


def _curves(exams: Sequence[ExamView]) -> list[Figure]:
    found = [one for one in select_usable(exams, "fourier") if _has_curves(one[2])]
    if not found:
        return []
    several = len(found) > 1
    height = (PANEL if several else PANEL + 90) * len(found) + 90
    titles = [label(name, one) for _, name, one in found] if several else ()
    plot = make_canvas(
        height, len(found), titles=titles, shared_xaxes=True, vertical_spacing=44 / height if several else 0
    )
    for row, (_, _, one) in enumerate(found, start=1):
        plot.add_traces([*_lines(one)], rows=row, cols=1)
    plot.add_trace(_depth_scale())
    plot.update_xaxes(title_text="frequency / π", row=len(found))
    plot.update_xaxes(range=[0, 1.01])
    plot.update_yaxes(title_text="Δ log amplitude")
    return [
        Figure(
            name="fourier-curves",
            title="Fourier curves of feature maps",
            reading="Each line is the log amplitude of the feature maps after one unit by frequency, relative to"
            " frequency zero; dark lines are early units and light ones late. Lines that sink with depth are a"
            " network that smooths, as Park and Kim saw in ViTs; lines that rise are one that sharpens, as they saw"
            " in ResNets.",
            paper="Park and Kim 2022, Fig. 2a, D.2 (P6)",
            table=_curve_table(found),
            plot=plot,
        )
    ]


def _has_curves(one: Measurement) -> bool:
    """Tell whether the curves are there, one for each unit."""
    return bool(one.units) and all(len(one.arrays.get(name, ())) == len(one.units) for name in _NEEDED)


def _lines(one: Measurement) -> list[go.Scatter]:
    frequencies, curves = (np.asarray(one.arrays[name], dtype=np.float64) for name in _NEEDED)
    colours = _colours(len(curves))
    return [
        go.Scatter(
            x=frequencies[number][known],
            y=curves[number][known],
            mode="lines",
            line={"color": colours[number], "width": 1.6},
            name=text,
            hovertemplate="%{fullData.name}<br>%{x:.3g} π: %{y:.3g}<extra></extra>",
            showlegend=False,
        )
        for number, text in enumerate(unit_names(one.units))
        if (known := np.isfinite(frequencies[number]) & np.isfinite(curves[number])).any()
    ]


def _colours(count: int) -> list[str]:
    """Return colours from the first unit's to the last one's."""
    colours: list[str] = sample_colorscale(SEQUENTIAL, np.linspace(*_ENDS, count).tolist())
    return colours


def _depth_scale() -> go.Scatter:
    """Return an empty trace that has the bar of colours."""
    bar = {
        "orientation": "h",
        "thickness": 10,
        "len": 0.5,
        "x": 0.5,
        "xref": "container",
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
        "outlinewidth": 0,
        "tickvals": [0, 1],
        "ticktext": ["first unit", "last unit"],
    }
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"color": [0], "colorscale": _colours(11), "cmin": 0, "cmax": 1, "colorbar": bar},
        hoverinfo="skip",
        showlegend=False,
    )


def _curve_table(found: Sequence[tuple[int, str, Measurement]]) -> Table:
    columns = (
        "network",
        "unit",
        "kind",
        "depth",
        "frequency / pi",
        "delta_log_amplitude",
        "half width",
        "interpolated",
    )
    rows = []
    for _, name, one in found:
        arrays = [one.arrays.get(key) for key in (*_NEEDED, "half_width", "interpolated")]
        for number, unit in enumerate(one.units):
            points = zip(*(_row(array, number, one.arrays["frequencies"].shape[1]) for array in arrays), strict=True)
            rows += [(name, unit.name, unit.kind, unit.depth, *point) for point in points if np.isfinite(point[0])]
    return Table(columns, rows)


def _row(array: NDArray[Any] | None, number: int, length: int) -> list[Any]:
    return [None] * length if array is None else list(array[number].tolist())
