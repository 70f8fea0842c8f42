"""The network itself: its anatomy, its size and speed (cost), and norms of its weights and activations.

An anatomy is a strip of units, coloured by kind, with grids and channels beneath its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic.reports.figure import KIND_MARKS, ExamView, Figure, Table, draws, escape_plotly, select_usable
from vitclinic.reports.figures.canvas import (
    GREY,
    Measurements,
    band,
    bars,
    ends,
    format_scalar,
    label,
    line,
    make_canvas,
    scalar_table,
    scale_for,
    select_known,
)
from vitclinic.reports.figures.depth import KIND_NAMES, unit_names

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
            plot=_plot_norms(found),
        )
    ]


def _list_fields(scalar: object) -> tuple[object, ...]:
    return tuple(getattr(scalar, key) for key in ("value", "low", "high", "n"))


def _plot_norms(found: Measurements) -> go.Figure:
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


_PANEL = 250
"""Pixels of height of a network's strip, with its title and what is written below it."""
_MIDDLE, _LEAST, _MOST = 0.69, 0.14, 0.6
"""Where the boxes of units are centred, and the heights of those without a grid and on the largest; 1 is the panel."""
_BARS = 0.26
"""Height of the bar of the unit with most parameters."""
_PALE = 0.55
"""Opacity of a unit without a residual."""
_PHONE, _LETTER = 300, 6.3
"""Pixels of width of a strip on a phone, and of a letter below it."""
_COLUMNS = {
    "grid_height": "rows",
    "grid_width": "columns",
    "prefix_tokens": "prefix tokens",
    "channels": "channels",
    "parameters": "parameters",
    "residual": "residual",
    "attention_map": "attention map",
    "heads": "heads",
}


@draws("anatomy")
def anatomy(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the units of each network from its input to its output."""
    found = [each for each in select_usable(exams, "anatomy") if each[2].units]
    if not found:
        return []
    return [
        Figure(
            name="anatomy",
            title="Units from the image to the output",
            reading="Each box is a unit: its colour is its kind, its height the size of its grid (logarithmic), a dot"
            " an attention map that can be recorded, and a pale box adds to no residual state; the bars below are its"
            " parameters. Dotted lines part stages; under each are the grid (+ tokens off it) and the channels (ch.) at"
            " its end.",
            paper="",
            table=_table(found),
            plot=_plot_strips(found),
            notes=list(_notes(found)),
        )
    ]


def _notes(found: Measurements) -> Iterator[str]:
    """Yield what one forward pass could not settle."""
    for _, name, one in found:
        for note in one.arrays.get("notes", ()):
            yield f"{name}: {note}" if len(found) > 1 else f"{str(note)[:1].upper()}{str(note)[1:]}"


def _table(found: Measurements) -> Table:
    rows = [
        [name, unit.name, unit.kind, unit.stage, unit.depth, *(_number(unit, key) for key in _COLUMNS), unit.note or ""]
        for _, name, one in found
        for unit in one.units
    ]
    return Table(("network", "unit", "kind", "stage", "depth", *_COLUMNS.values(), "removed by"), rows)


def _number(unit: UnitRow, key: str) -> int | None:
    """Return a count of a unit, if it is known."""
    scalar = unit.values.get(key)
    return int(scalar.value) if scalar is not None and math.isfinite(scalar.value) else None


def _plot_strips(found: Measurements) -> go.Figure:
    kinds = [kind for kind in KIND_NAMES if any(unit.kind == kind for _, _, one in found for unit in one.units)]
    height = _PANEL * len(found)
    plot = make_canvas(
        height,
        len(found),
        titles=[label(name, one, _describe(one)) for _, name, one in found],
        legend=-(-(len(kinds) + 1) // 2),
        vertical_spacing=108 / height if len(found) > 1 else 0,
    )
    lines: list[dict[str, Any]] = []
    for row, (_, _, one) in enumerate(found, start=1):
        for trace in (*_boxes(one.units), *_dots(one.units)):
            plot.add_trace(trace, row, 1)
        lines += _borders(row, one.units)
        labels = _stage_labels(one.units)
        plot.update_xaxes(
            range=[-0.6, len(one.units) - 0.4],
            tickvals=list(labels),
            ticktext=list(labels.values()),
            row=row,
        )
    plot.update_xaxes(showgrid=False, showline=False, tickangle=0, ticks="", tickfont_size=11)
    plot.update_yaxes(range=[0, 1], showgrid=False, showline=False, showticklabels=False, ticks="")
    plot.update_layout(barmode="overlay", shapes=lines, margin_t=48)
    for kind in kinds:
        plot.add_trace(_entry(KIND_NAMES[kind], color=KIND_MARKS[kind], symbol="square", size=11))
    if any(_number(unit, "attention_map") for _, _, one in found for unit in one.units):
        ring = {"color": GREY, "width": 1}
        plot.add_trace(_entry("attention map", color="white", symbol="circle", size=7, line=ring))
    return plot


def _entry(name: str, **marker: Any) -> go.Scatter:
    """Return an entry of the legend."""
    return go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, hoverinfo="skip")


def _describe(one: Measurement) -> str:
    """Return the class of a network, how its units were found and how many there are."""
    network, family = (str(one.arrays.get(key, "")) for key in ("network", "family"))
    observed = one.scalars.get("observed")
    how = "observed" if observed is not None and observed.value else family
    return escape_plotly(", ".join(part for part in (network, how, f"{len(one.units)} units") if part))


def _boxes(units: Sequence[UnitRow]) -> Iterator[go.Bar]:
    """Yield the boxes of the units, and bars of their parameters."""
    heights = _heights(units)
    counts = [_number(unit, "parameters") or 0 for unit in units]
    most = max(counts) or 1
    style = {
        "x": list(range(len(units))),
        "customdata": [_hover(unit) for unit in units],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }
    colours = [KIND_MARKS.get(unit.kind, GREY) for unit in units]
    pale = [1.0 if _number(unit, "residual") else _PALE for unit in units]
    marker = {"color": colours, "opacity": pale, "cornerradius": 3, "line": {"width": 0}}
    yield go.Bar(y=heights, base=[_MIDDLE - height / 2 for height in heights], width=0.86, marker=marker, **style)
    bars = [_BARS * count / most for count in counts]
    yield go.Bar(y=bars, width=0.86, marker={"color": colours, "opacity": _PALE, "line": {"width": 0}}, **style)


def _heights(units: Sequence[UnitRow]) -> list[float]:
    """Return the heights of boxes, by the logarithm of the side of the grid."""
    sides = [_number(unit, "grid_height") for unit in units]
    others = [_number(unit, "grid_width") for unit in units]
    areas = [max((side or 1) * (other or 1), 1) for side, other in zip(sides, others, strict=True)]
    largest = math.log(max(areas)) or 1.0
    return [_LEAST + (_MOST - _LEAST) * math.log(area) / largest for area in areas]


def _dots(units: Sequence[UnitRow]) -> Iterator[go.Scatter]:
    """Yield a mark on each unit with an attention map."""
    marked = [number for number, unit in enumerate(units) if _number(unit, "attention_map")]
    if marked:
        marker = {"color": "white", "size": 5, "symbol": "circle"}
        y = [_MIDDLE] * len(marked)
        yield go.Scatter(x=marked, y=y, mode="markers", marker=marker, hoverinfo="skip", showlegend=False)


def _hover(unit: UnitRow) -> str:
    """Return what a box says under the pointer, a fact a line."""
    (name,) = unit_names([unit])
    counts = {key: _number(unit, key) for key in ("channels", "parameters", "heads")}
    lines = [
        f"{unit.depth} {name}",
        _grid(unit),
        *(f"{count:,} {key}" for key, count in counts.items() if count is not None),
        "attention map" if _number(unit, "attention_map") else "",
        "residual" if _number(unit, "residual") else "",
        f"removed by: {escape_plotly(unit.note)}" if unit.note else "",
    ]
    return "<br>".join(line for line in lines if line)


def _grid(unit: UnitRow) -> str:
    height, width, prefix = (_number(unit, key) for key in ("grid_height", "grid_width", "prefix_tokens"))
    return "" if height is None or width is None else f"{height} × {width}{f' + {prefix}' if prefix else ''}"


def _stages(units: Sequence[UnitRow]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last unit of each stage, and of each return to one."""
    for _, numbers in groupby(range(len(units)), key=lambda number: units[number].stage):
        found = list(numbers)
        yield found[0], found[-1]


def _stage_labels(units: Sequence[UnitRow]) -> dict[float, str]:
    """Return what is written below each stage, by the middle of the stage, as far as a phone has room for it."""
    labels = {}
    for first, last in _stages(units):
        on_grid = [unit for unit in units[first : last + 1] if _grid(unit)]
        if not on_grid:
            continue
        room = _PHONE * (last + 1 - first) / len(units) / _LETTER
        channels = _number(on_grid[-1], "channels")
        lines = [
            f"stage {units[first].stage}",
            _grid(on_grid[-1]),
            "" if channels is None else f"{channels:,} ch.",
        ]
        labels[(first + last) / 2] = "<br>".join(line if len(line) <= room else " " for line in lines)
    return labels


def _borders(row: int, units: Sequence[UnitRow]) -> list[dict[str, Any]]:
    """Return lines between stages."""
    suffix = "" if row == 1 else str(row)  # as plotly names axes
    axes = {"type": "line", "xref": f"x{suffix}", "yref": f"y{suffix} domain", "y0": 0, "y1": 1, "layer": "below"}
    dotted = {"color": GREY, "width": 1.2, "dash": "dot"}
    return [{**axes, "x0": first - 0.5, "x1": first - 0.5, "line": dotted} for first, _ in _stages(units) if first]
