"""Measurements as figures, as the papers draw them; `draw` draws those of any probe.

A figure that a probe declares (`FigureSpec`) is drawn here, as is every value of the units of one that declares none.
One that takes more is a function with the decorator `draws`, in one of these modules or in an installed package that
names it by an entry point of the group `vitclinic.figures`.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic._core.errors import RecipeError
from vitclinic._core.registry import FigureSpec, load_entry_points
from vitclinic.reports.figure import DRAWERS, Drawer, ExamView, Figure, Table, escape_plotly, select_usable
from vitclinic.reports.figures import accuracy as accuracy
from vitclinic.reports.figures import attention as attention
from vitclinic.reports.figures import dense as dense
from vitclinic.reports.figures import embedding_map as embedding_map
from vitclinic.reports.figures import errors as errors
from vitclinic.reports.figures import image_maps as image_maps
from vitclinic.reports.figures import label_errors as label_errors
from vitclinic.reports.figures import landscape as landscape
from vitclinic.reports.figures import network as network
from vitclinic.reports.figures import representation as representation
from vitclinic.reports.figures import robustness as robustness
from vitclinic.reports.figures import sharpness as sharpness
from vitclinic.reports.figures import slices as slices
from vitclinic.reports.figures import spectra as spectra
from vitclinic.reports.figures import token_norms as token_norms
from vitclinic.reports.figures import training as training
from vitclinic.reports.figures import vqa as vqa
from vitclinic.reports.figures.canvas import compare_scalars, is_wide, scalar_table, select_known
from vitclinic.reports.figures.depth import (
    Series,
    collect_series,
    draw_shaded_bars,
    draw_shaded_lines,
    overlay,
    unit_table,
)
from vitclinic.reports.summary import find_facts

ENTRY_POINTS = "vitclinic.figures"
READING = (
    "Each point is one unit of the network, from the input at the left to the head at the right, with its interval"
    " where there is one. The probe's own documentation says what the value means."
)


def draw(probe: str, exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the measurements of a probe.

    Args:
        probe: Its name; `training` draws a run's metrics.
        exams: The networks.

    Returns:
        The figures of the function that is registered for the probe; else those that the probe declares; else one for
        each value of its units, by depth. Empty where no network has a usable measurement.
    """
    load_entry_points(ENTRY_POINTS, _check_draws)
    if probe in DRAWERS:
        return DRAWERS[probe](exams)
    facts = find_facts(exams, probe)
    if facts.figures:
        return [figure for spec in facts.figures for figure in draw_declared(spec, probe, exams, facts.paper)]
    return draw_by_depth(probe, exams)


def draw_figure(networks: Sequence[ExamView], probe: str, name: str | None = None) -> go.Figure:
    """Return one figure of a probe for some networks.

    Args:
        networks: The networks.
        probe: The probe's name.
        name: Which figure, if there are several; by default the first.

    Raises:
        RecipeError: If there is nothing to draw, or no figure of that name.
    """
    plots = {figure.name: figure.plot for figure in draw(probe, networks) if figure.plot is not None}
    if not plots:
        reasons = [str(found.reason) for network in networks if (found := network.measurements.get(probe))]
        raise RecipeError(f"There is nothing to draw of '{probe}': {' '.join(reasons) or 'it was not measured.'}")
    if name is not None and name not in plots:
        raise RecipeError(f"'{probe}' has no figure '{name}'; it has {', '.join(plots)}.")
    return plots[name] if name is not None else next(iter(plots.values()))


def _check_draws(loaded: Drawer) -> None:
    """Loading an entry point has registered it, if it is what it should be."""
    if loaded not in DRAWERS.values():
        raise TypeError(f"{loaded!r} draws nothing: decorate it with vitclinic.reports.draws(PROBE)")


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
