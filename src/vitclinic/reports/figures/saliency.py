"""Saliency: how a class goes and comes with the pixels of its maps, and the maps over their images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.attention import draw_maps, has_maps, map_table
from vitclinic.reports.figures.canvas import finite, label, line, make_canvas
from vitclinic.reports.formatting import escape_plotly

_PAPER = "Petsiuk et al. 2018 (RISE, Sec. 4)"
_CURVES = {"insertion": "pixels inserted", "deletion": "pixels deleted"}

Found = Sequence[tuple[int, str, Measurement]]


@draws("saliency")
def saliency(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the curves of insertion and deletion, and the maps."""
    found = select_usable(exams, "saliency")
    return [*_curves([one for one in found if _has_curves(one[2])]), *_maps(found)]


def _has_curves(one: Measurement) -> bool:
    return all(f"{order}{curve}" in one.arrays for curve in _CURVES for order in ("", "shuffled_"))


def _curves(found: Found) -> list[Figure]:
    if not found:
        return []
    plot = make_canvas(320, 1, 2, list(_CURVES.values()), legend=2 * len(found), shared_yaxes=True)
    for column, curve in enumerate(_CURVES, start=1):
        for trace in (trace for one in found for trace in _lines(one, curve, shown=column == 1)):
            plot.add_trace(trace, 1, column)
    plot.update_xaxes(title_text="share of pixels", tickformat=".0%")
    plot.update_yaxes(title_text="probability of the class", rangemode="tozero", col=1)
    return [
        Figure(
            name="saliency-curves",
            title="What saliency maps are worth",
            reading="Each line is the probability of the class, mean over images, as the most salient pixels come into"
            " a blurred image (left) or leave the image (right); dotted, in the order of the same maps shuffled. A map"
            " that means something lies above its dotted line at the left and below it at the right.",
            paper=_PAPER,
            table=_table(found),
            plot=plot,
        )
    ]


def _lines(one: tuple[int, str, Measurement], curve: str, shown: bool) -> list[go.Scatter]:
    place, name, measurement = one
    method = escape_plotly(str(measurement.arrays["method"][0])) if "method" in measurement.arrays else ""
    traces = []
    for order, dash, width in (("", "solid", 2), ("shuffled_", "dot", 1.5)):
        y = finite(measurement.arrays[f"{order}{curve}"])
        trace = line(
            place,
            label(name, measurement, "shuffled" if order else method),
            np.linspace(0, 1, len(y)),
            y,
            shown,
            mode="lines",
            hovertemplate="%{x:.0%} of the pixels: %{y:.3f}",
        )
        traces.append(trace.update(line_dash=dash, line_width=width))
    return traces


def _table(found: Found) -> Table:
    rows = [
        (name, curve, order or "map", float(share), float(value))
        for _, name, one in found
        for curve in _CURVES
        for order in ("", "shuffled")
        for values in [one.arrays[f"{order}_{curve}" if order else curve]]
        for share, value in zip(np.linspace(0, 1, len(values)), values, strict=True)
    ]
    return Table(("network", "curve", "order", "share of pixels", "probability"), rows)


def _maps(found: Found) -> list[Figure]:
    looks = [(name, one) for _, name, one in found if has_maps(one)]
    if not looks:
        return []
    return [
        Figure(
            name="saliency-maps",
            title="Where the class comes from",
            reading="Each picture is an image and, to its right, the same in grey under the saliency of its class, from"
            " dark blue, the map's lowest value, to light yellow, its highest. Look at the curves before believing one:"
            " a map that means nothing looks as good.",
            paper="Selvaraju et al. 2017; Abnar and Zuidema 2020; Chefer et al. 2021 (Eq. 5)",
            table=map_table(looks, "saliency"),
            pictures=draw_maps(looks),
        )
    ]
