"""Figures that need no code of their own: those that a probe declares, and every value of its units by depth."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic._core.registry import FigureSpec
from vitclinic.reports.figure import ExamView, Figure, Table, select_usable
from vitclinic.reports.figures.canvas import is_wide
from vitclinic.reports.figures.depth import draw_shaded_bars, draw_shaded_lines, overlay
from vitclinic.reports.figures.scalars import compare_scalars, scalar_table, select_known
from vitclinic.reports.figures.units import Series, collect_series, unit_table
from vitclinic.reports.formatting import escape_plotly

READING = (
    "Each point is one unit of the network, from the input at the left to the head at the right, with its interval"
    " where there is one. The probe's own documentation says what the value means."
)


def draw_declared(spec: FigureSpec, probe: str, exams: Sequence[ExamView], paper: str = "") -> list[Figure]:
    """Draw a figure as its probe declares it.

    Args:
        spec: The declaration.
        probe: The probe whose measurements are drawn.
        exams: The networks.
        paper: Where the figure comes from, unless its declaration says so.

    Returns:
        The figure; nothing where no network has any of its values.
    """
    drawn = _compare(spec, probe, exams) if spec.kind == "scalars" else _by_depth(spec, probe, exams)
    if drawn is None:
        return []
    plot, table = drawn
    return [Figure(spec.name, spec.title, spec.reading, spec.paper or paper, table, plot)]


def draw_by_depth(probe: str, exams: Sequence[ExamView]) -> list[Figure]:
    """Draw each value of the units of a probe that declares no figure."""
    found = select_usable(exams, probe)
    values = dict.fromkeys(name for _, _, one in found for row in one.units for name in row.values)
    specs = [
        FigureSpec(
            name=f"{probe}-value-{number}",
            kind="layers",
            values={value: value},
            title=f"{value} by depth",
            reading=READING,
        )
        for number, value in enumerate(values, 1)
    ]
    return [figure for spec in specs for figure in draw_declared(spec, probe, exams)]


def _compare(spec: FigureSpec, probe: str, exams: Sequence[ExamView]) -> tuple[go.Figure, Table] | None:
    found = select_usable(exams, probe)
    rows = select_known(found, {key: escape_plotly(title) for key, title in spec.values.items()})
    if not rows:
        return None
    table = scalar_table(found, {**rows, **dict.fromkeys(spec.table, "")})
    return compare_scalars(found, rows, escape_plotly(spec.axis), share=spec.share), table


def _by_depth(spec: FigureSpec, probe: str, exams: Sequence[ExamView]) -> tuple[go.Figure, Table] | None:
    found = {escape_plotly(title): collect_series(exams, probe, value) for value, title in spec.values.items()}
    panels = {title: networks for title, networks in found.items() if networks}
    if not panels:
        return None
    return _PLOTS[spec.kind](spec, panels), unit_table(exams, probe, [*spec.values, *spec.table])


def _plot_states(spec: FigureSpec, panels: dict[str, list[Series]]) -> go.Figure:
    ((title, found),) = panels.items()
    values = [[scalar.value for scalar in one.scalars] for one in found]
    log = any(is_wide(numbers) for numbers in values) and all(number > 0 for numbers in values for number in numbers)
    plot = draw_shaded_lines(found, title, log=log)
    return plot.update_yaxes(tickformat=".0%") if spec.share else plot


def _plot_units(spec: FigureSpec, panels: dict[str, list[Series]]) -> go.Figure:
    ((title, found),) = panels.items()
    return draw_shaded_bars(found, title, share=spec.share)


def _plot_layers(spec: FigureSpec, panels: dict[str, list[Series]]) -> go.Figure:
    plot = overlay(panels, escape_plotly(spec.axis) or "unit", share=spec.share)
    return plot.update_yaxes(rangemode="tozero") if spec.share else plot


_PLOTS = {"states": _plot_states, "units": _plot_units, "layers": _plot_layers}
