"""Measurements as figures, as the papers draw them; `draw` draws those of any probe.

A figure that a probe declares (`FigureSpec`) needs nothing here. One that takes more is a function with the decorator
`draws`, in one of these modules or in an installed package that names it by an entry point of the group
`vitclinic.figures`.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic._core.errors import RecipeError
from vitclinic._core.registry import load_entry_points
from vitclinic.reports.figure import DRAWERS, Drawer, ExamView, Figure
from vitclinic.reports.figures import accuracy as accuracy
from vitclinic.reports.figures import anatomy as anatomy
from vitclinic.reports.figures import attention as attention
from vitclinic.reports.figures import cka as cka
from vitclinic.reports.figures import corruptions as corruptions
from vitclinic.reports.figures import fourier as fourier
from vitclinic.reports.figures import landscape as landscape
from vitclinic.reports.figures import network as network
from vitclinic.reports.figures import robustness as robustness
from vitclinic.reports.figures import saliency as saliency
from vitclinic.reports.figures import sharpness as sharpness
from vitclinic.reports.figures import spectra as spectra
from vitclinic.reports.figures import token_norms as token_norms
from vitclinic.reports.figures import training as training
from vitclinic.reports.figures.declared import draw_by_depth, draw_declared
from vitclinic.reports.summary import find_facts

ENTRY_POINTS = "vitclinic.figures"


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
        raise TypeError(f"{loaded!r} draws nothing: decorate it with vitclinic.reports.figure.draws(PROBE)")
