"""High frequencies of feature maps by depth, their change across units, and the whole curves [park2022 Fig. 2a, 8]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import label, make_canvas
from vitclinic.reports.figures.depth import PANEL, draw_shaded_bars, draw_shaded_lines
from vitclinic.reports.figures.units import collect_series, unit_names, unit_table
from vitclinic.reports.theme import SEQUENTIAL

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
