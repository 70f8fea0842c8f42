"""Values of units by depth: lines or bars, with the kinds of units as shades behind them, as in [park2022 Fig. 8-10].

Values are read from measurements. Networks with the same units share a panel. Where networks with other units share
one, too (`overlay`), depth is the share of the way from the first unit drawn to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic.reports.figure import (
    KIND_SYMBOLS,
    KINDS,
    ExamView,
    Table,
    escape_plotly,
    network_colour,
    select_usable,
    with_opacity,
)
from vitclinic.reports.figures.canvas import (
    GREY,
    Floats,
    band,
    ends,
    error_bars,
    finite,
    format_scalar,
    label,
    line,
    make_canvas,
    trace_group,
)

KIND_NAMES = {
    "stem": "stem",
    "position": "position",
    "msa": "MSA",
    "mlp": "MLP",
    "conv": "conv",
    "token_mlp": "token MLP",
    "pool": "pooling",
    "head": "head",
}
"""The kinds of units as figures name them, in the order of legends."""

Anatomy = tuple[tuple[str, int, int], ...]
"""Kind, stage and depth of some units."""


@dataclass(frozen=True)
class Series:
    """One value of the units of one network that have it."""

    place: int
    name: str
    measurement: Measurement
    units: tuple[UnitRow, ...]
    value: str

    @property
    def label(self) -> str:
        """The network in a legend."""
        return label(self.name, self.measurement)

    @property
    def scalars(self) -> list[Scalar]:
        """The values, in the order of the units."""
        return [unit.values[self.value] for unit in self.units]

    @property
    def depths(self) -> Floats:
        """The depths of the units."""
        return np.array([unit.depth for unit in self.units], dtype=np.float64)

    @property
    def anatomy(self) -> Anatomy:
        """All units that were measured; networks of the same anatomy share an axis."""
        return tuple((unit.kind, unit.stage, unit.depth) for unit in self.measurement.units)


def collect_series(exams: Sequence[ExamView], probe: str, value: str) -> list[Series]:
    """Return a series for each network with a unit that has the value."""
    found = []
    for place, name, measurement in select_usable(exams, probe):
        units = tuple(unit for unit in measurement.units if value in unit.values)
        if units:
            found.append(Series(place, name, measurement, units, value))
    return found


def unit_names(units: Sequence[UnitRow]) -> list[str]:
    """Return units for hover boxes: name, kind and stage, escaped for plotly."""
    return [
        f"{escape_plotly(u.name)} ({escape_plotly(KIND_NAMES.get(u.kind, u.kind))}, stage {u.stage})" for u in units
    ]


def read_heads(measurement: Measurement, array: str) -> Floats | None:
    """Return an array of heads, [layers, heads], NaN where a layer has fewer; None if the measurement has none."""
    values = measurement.arrays.get(array)
    if values is None or values.ndim != 2 or len(values) != len(measurement.units):
        return None
    return finite(values)


def unit_table(exams: Sequence[ExamView], probe: str, values: Sequence[str], heads: str = "") -> Table:
    """Return values of all units that have one, with intervals, and those of heads from the array `heads`."""
    found = [one for _, name, measurement in select_usable(exams, probe) for one in _rows(name, measurement, heads)]
    found = [(name, unit, of_heads) for name, unit, of_heads in found if any(value in unit.values for value in values)]
    units = [unit for _, unit, _ in found]
    parts = [part for value in values for part in _parts(value, [u.values[value] for u in units if value in u.values])]
    most = max((len(of_heads) for _, _, of_heads in found), default=0)
    columns = ["network", "unit", "kind", "stage", "depth", *(title for title, _, _ in parts)]
    columns += [f"{heads.removeprefix('head_')} of head {number}" for number in range(most)]
    rows = [
        [name, unit.name, unit.kind, unit.stage, unit.depth]
        + [getattr(unit.values.get(value), part, None) for _, value, part in parts]
        + [*of_heads, *[None] * (most - len(of_heads))]
        for name, unit, of_heads in found
    ]
    return Table(tuple(columns), rows)


def _rows(name: str, measurement: Measurement, heads: str) -> Iterator[tuple[str, UnitRow, list[Any]]]:
    of_heads = read_heads(measurement, heads)
    for number, unit in enumerate(measurement.units):
        known = [] if of_heads is None else [None if np.isnan(one) else float(one) for one in of_heads[number]]
        yield name, unit, known


def _parts(value: str, scalars: Sequence[Scalar]) -> list[tuple[str, str, str]]:
    """Return the columns of a value as (title, value, field), with the ends of its interval if it ever has one."""
    if not scalars:
        return []
    uncertain = any(scalar.low is not None or scalar.high is not None for scalar in scalars)
    ends = [(f"{value} {end}", value, end) for end in ("low", "high")] if uncertain else []
    return [(value, value, "value"), *ends]


PANEL = 210
"""Pixels of height of a panel, with what is written at its axes."""
Shape = dict[str, Any]
SHARE = "depth (first unit 0, last 1)"
_AXIS_HEIGHT = 50
"""Pixels below the last panel, for what is written there."""
_TITLE = 44
"""Characters that a phone has room for above a panel."""


def draw_shaded_lines(found: Sequence[Series], axis: str, log: bool = False) -> go.Figure:
    """Draw values of states, joined; the shade between two states is the unit that leads from one to the other."""
    panels = _group_by_anatomy(found)
    plot = _panels(panels, axis, margin=0.4)
    shades: list[Shape] = []
    for row, panel in enumerate(panels, start=1):
        for one in panel:
            for trace in (*_line(one, one.depths, shown=True), _points(one, one.depths)):
                plot.add_trace(trace, row, 1)
        shades += _shades(row, panel[0].measurement.units, before=1.0)
    _kind_entries(plot, found, shades=True)
    plot.update_yaxes(type="log" if log else "linear")
    plot.update_layout(shapes=shades)  # at once: one after another takes seconds
    return plot


def draw_shaded_bars(found: Sequence[Series], axis: str, share: bool = False) -> go.Figure:
    """Draw values of the units themselves, on one scale: a bar from zero with its interval, on the unit's shade."""
    panels = _group_by_anatomy(found)
    plot = _panels(panels, axis, margin=0.55)
    shades: list[Shape] = []
    for row, panel in enumerate(panels, start=1):
        width = 0.7 / len(panel)
        for turn, one in enumerate(panel):
            x = one.depths + (turn - (len(panel) - 1) / 2) * width
            plot.add_trace(_bars(one, x, 0.9 * width), row, 1)
            plot.add_trace(_points(one, x, share, intervals=True, size=8 if len(panel) < 4 else 5), row, 1)
        shades += _shades(row, panel[0].measurement.units, before=0.5)
    _kind_entries(plot, found, shades=True)
    plot.update_yaxes(zeroline=True, zerolinecolor=GREY, zerolinewidth=1, tickformat=".0%" if share else None)
    for row in range(2, len(panels) + 1):
        plot.update_yaxes(matches="y", row=row)
    plot.update_layout(barmode="overlay", shapes=shades)
    return plot


def overlay(
    panels: Mapping[str, Sequence[Series]], unit: str, share: bool = False, height: int = PANEL + 70
) -> go.Figure:
    """Draw all networks in one panel for each value, whose axis titles are the keys; `unit` names what a point is."""
    everything = [one for found in panels.values() for one in found]
    shared = same_units(everything)
    total, lines = height * len(panels) + _AXIS_HEIGHT, _legend_lines(everything)
    plot = make_canvas(total, len(panels), legend=lines, shared_xaxes=True, vertical_spacing=30 / total)
    known: set[int] = set()
    for row, (axis, found) in enumerate(panels.items(), start=1):
        for one in found:
            x = places(one, shared)
            for trace in (*_line(one, x, shown=one.place not in known), _points(one, x, share)):
                plot.add_trace(trace, row, 1)
            known.add(one.place)
        plot.update_yaxes(title_text=axis, tickformat=".0%" if share else None, row=row)
    plot.update_xaxes(title_text=unit if shared else SHARE, row=len(panels))
    if shared:
        plot.update_xaxes(tick0=1, dtick=_step(len(everything[0].anatomy)))
    _kind_entries(plot, everything, shades=False)
    return plot


def same_units(found: Iterable[Series]) -> bool:
    """Tell whether all networks have the same units."""
    return len({one.anatomy for one in found}) <= 1


def places(one: Series, shared: bool) -> Floats:
    """Return where a network's units are on the axis: numbered if all networks have the same, else as share of it."""
    depths = sorted(depth for _, _, depth in one.anatomy)
    if shared:
        return (1 + np.searchsorted(depths, one.depths)).astype(np.float64)
    return (one.depths - depths[0]) / max(depths[-1] - depths[0], 1)


def _group_by_anatomy(found: Sequence[Series]) -> list[list[Series]]:
    groups: dict[Anatomy, list[Series]] = {}
    for one in found:
        groups.setdefault(one.anatomy, []).append(one)
    return list(groups.values())


def _panels(panels: Sequence[Sequence[Series]], axis: str, margin: float) -> go.Figure:
    """Return empty panels one below another, headed by the networks in them, with a margin beside the units."""
    several = len(panels) > 1
    height = (PANEL if several else PANEL + 90) * len(panels) + _AXIS_HEIGHT
    titles = [_title(panel) for panel in panels] if several else ()
    lines = _legend_lines([one for panel in panels for one in panel])
    plot = make_canvas(height, len(panels), titles=titles, legend=lines, vertical_spacing=62 / height if several else 0)
    for row, panel in enumerate(panels, start=1):
        depths = [depth for _, _, depth in panel[0].anatomy]
        ends = [depths[0] - margin, depths[-1] + margin]
        plot.update_xaxes(range=ends, dtick=_step(len(depths)), showgrid=False, row=row)
    plot.update_yaxes(title_text=axis)
    plot.update_xaxes(title_text="unit", row=len(panels))
    return plot


def _step(units: int) -> int:
    """Return the step between the numbers at an axis, so that they have room on a phone."""
    return -(-units // 14)


def _title(panel: Sequence[Series]) -> str:
    """Return the networks of a panel, as far as there is room."""
    if sum(len(one.name) for one in panel) <= _TITLE:
        return ", ".join(one.label for one in panel)
    return panel[0].label if len(panel) == 1 else f"{panel[0].label} and {len(panel) - 1} more"


def _legend_lines(found: Sequence[Series]) -> int:
    """Return the lines of a legend on a phone, where two entries have room in a line."""
    entries = len({one.place for one in found}) + len({unit.kind for one in found for unit in one.units})
    return -(-entries // 2)


def _line(one: Series, x: Floats, shown: bool) -> list[go.Scatter]:
    values, low, high = ends(one.scalars)
    style = {"mode": "lines", "hoverinfo": "skip", "legendrank": one.place}
    return [band(one.place, x, low, high), line(one.place, one.label, x, values, shown, **style)]


def _points(one: Series, x: Floats, share: bool = False, intervals: bool = False, size: int = 8) -> go.Scatter:
    """Return a point for each unit, with the symbol of the unit's kind."""
    values, low, high = ends(one.scalars)
    symbols = [KIND_SYMBOLS.get(unit.kind, "circle") for unit in one.units]
    numbers = [format_scalar(scalar, ".1%" if share else ".4g") for scalar in one.scalars]
    return go.Scatter(
        x=x,
        y=finite(values),
        mode="markers",
        marker={"color": network_colour(one.place), "symbol": symbols, "size": size},
        error_y=error_bars(values, low, high, one.place) if intervals else None,
        customdata=list(zip(unit_names(one.units), numbers, strict=True)),
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}",
        **trace_group(one.place, one.label, shown=False),
    )


def _bars(one: Series, x: Floats, width: float) -> go.Bar:
    return go.Bar(
        x=x,
        y=finite(ends(one.scalars)[0]),
        width=width,
        marker={"color": with_opacity(one.place, 0.45), "line": {"width": 1, "color": network_colour(one.place)}},
        hoverinfo="skip",
        legendrank=one.place,
        **trace_group(one.place, one.label),
    )


def _shades(row: int, units: Sequence[UnitRow], before: float) -> list[Shape]:
    """Return the kinds of units behind a panel, each from `before` its depth on, and lines between stages."""
    suffix = "" if row == 1 else str(row)  # as plotly names axes
    axes = {"xref": f"x{suffix}", "yref": f"y{suffix} domain", "y0": 0, "y1": 1, "layer": "below"}
    kinds = [
        {"type": "rect", "x0": unit.depth - before, "x1": unit.depth - before + 1, "fillcolor": KINDS[unit.kind]}
        for unit in units
        if unit.kind in KINDS
    ]
    borders = [
        {"type": "line", "x0": later.depth - before, "x1": later.depth - before}
        for one, later in pairwise(units)
        if later.stage != one.stage
    ]
    dotted = {"color": GREY, "width": 1.5, "dash": "dot"}
    return [axes | kind | {"line": {"width": 0}} for kind in kinds] + [
        axes | each | {"line": dotted} for each in borders
    ]


def _kind_entries(plot: go.Figure, found: Sequence[Series], shades: bool) -> None:
    """Explain symbols and shades in the legend, if there are several kinds."""
    present = {unit.kind for one in found for unit in one.units}
    if len(present) < 2 and not shades:
        return
    for kind in (kind for kind in KIND_NAMES if kind in present):
        shade = {"fill": "toself", "fillcolor": KINDS[kind]} if shades and kind in KINDS else {}
        plot.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={"color": GREY, "symbol": KIND_SYMBOLS[kind], "size": 8},
                name=KIND_NAMES[kind],
                hoverinfo="skip",
                **shade,
            )
        )
