"""Norms of tokens: how many stand out by depth, how norms are distributed, and where on the grid they are large."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import SEQUENTIAL, ExamView, Figure, Table, draws, escape_plotly, select_usable
from vitclinic.reports.figures.canvas import PANEL_LONGEST, Floats, finite, label, make_canvas, put_colours_below
from vitclinic.reports.figures.depth import collect_series, overlay, unit_names, unit_table

_PAPER = "Darcet et al. 2024 (Fig. 3, 4)"
_LAST = 2
"""Units whose maps are shown of each network: as many as have room beside each other on a phone."""
_PANEL = 260
"""Pixels of height of a row of panels, with their titles."""

Found = Sequence[tuple[str, Measurement]]


@draws("token_norms")
def token_norms(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the share of outliers by depth, the distribution of norms and the norms of the last layers' positions."""
    found = [(name, one) for _, name, one in select_usable(exams, "token_norms")]
    return [*_outliers(exams), *_distribution(found), *_maps(found)]


def _outliers(exams: Sequence[ExamView]) -> list[Figure]:
    values = {"outlier patches": "outliers", "largest / median norm": "peak"}
    panels = {title: collect_series(exams, "token_norms", value) for title, value in values.items()}
    panels = {title: found for title, found in panels.items() if found}
    if not panels:
        return []
    return [
        Figure(
            name="token-norms-outliers",
            title="Patches that stand out by their norm",
            reading="Each point is the share of patches whose norm after a unit is far above that of the other patches,"
            " and below it the largest norm in medians. Darcet et al. found some 2% of such tokens from the middle of"
            " large ViTs on, in places without information, and none in networks trained with registers.",
            paper=_PAPER,
            table=unit_table(exams, "token_norms", ["outliers", "images_with_outliers", "peak", "norm", "prefix_norm"]),
            plot=overlay(panels, "unit").update_yaxes(rangemode="tozero"),
        )
    ]


def _distribution(found: Found) -> list[Figure]:
    found = [(name, one) for name, one in found if _has_rows(one, "distribution") and "edges" in one.arrays]
    if not found:
        return []
    plot = _canvas([label(name, one, longest=PANEL_LONGEST) for name, one in found])
    for number, (_, one) in enumerate(found):
        shares, middles = finite(one.arrays["distribution"]), _middles(one)
        used = np.flatnonzero(np.nan_to_num(shares).sum(0))
        kept = slice(used[0], used[-1] + 1) if used.size else slice(0)
        cells = go.Heatmap(
            x=list(range(len(one.units))),
            y=middles[kept],
            z=np.where(shares > 0, shares, np.nan).T[kept],
            customdata=np.tile(unit_names(one.units), (len(middles[kept]), 1)),
            coloraxis="coloraxis",
            hovertemplate="%{customdata}<br>norm %{y:.3g}: %{z:.2%}<extra></extra>",
        )
        plot.add_trace(cells, number // 2 + 1, number % 2 + 1)
    plot.update_yaxes(type="log", dtick=1)
    plot.update_yaxes(title_text="norm", col=1)
    plot.update_xaxes(title_text="unit")
    put_colours_below(plot, "share of patches", colorscale=SEQUENTIAL, cmin=0)
    return [
        Figure(
            name="token-norms-distribution",
            title="Distribution of the norms of patches",
            reading="Each column is a unit, each cell the share of patches with such a norm after it, mean over images."
            " A second group far above the first is what Darcet et al. call outlier tokens.",
            paper=_PAPER,
            table=_distribution_table(found),
            plot=plot,
        )
    ]


def _maps(found: Found) -> list[Figure]:
    found = [(name, one) for name, one in found if _has_rows(one, "mean_norm")]
    if not found:
        return []
    places = [(name, one, at) for name, one in found for at in range(max(0, len(one.units) - _LAST), len(one.units))]
    titles = [f"{label(name, one, longest=PANEL_LONGEST)}<br>{_unit_name(one, at)}" for name, one, at in places]
    plot = _canvas(titles)
    for number, (_, one, at) in enumerate(places):
        cells = _on_grid(one, at)
        cells = go.Heatmap(
            z=cells / np.nanmedian(cells),
            coloraxis="coloraxis",
            customdata=cells,
            hovertemplate="row %{y}, column %{x}<br>%{z:.2f} medians, norm %{customdata:.4g}<extra></extra>",
        )
        plot.add_trace(cells, number // 2 + 1, number % 2 + 1)
        axis = plot.data[-1].xaxis
        square = {"scaleanchor": axis, "constrain": "domain", "autorange": "reversed"}
        plot.update_yaxes(**square, row=number // 2 + 1, col=number % 2 + 1)
    plot.update_xaxes(showgrid=False, constrain="domain")
    put_colours_below(plot, "mean norm / median over positions", colorscale=SEQUENTIAL)
    return [
        Figure(
            name="token-norms-maps",
            title="Where norms are large, after the last layers",
            reading="Each cell is the norm of the patch at a position after one of the last two units, averaged over"
            " images and divided by the median over positions. A single bright cell is a place that the network uses"
            " for something of its own, whatever the image shows there.",
            paper=_PAPER,
            table=_maps_table(places),
            plot=plot,
        )
    ]


def _canvas(titles: Sequence[str]) -> go.Figure:
    """Return panels, two in a row."""
    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    height = _PANEL * rows + 90
    plot = make_canvas(height, rows, columns, titles, vertical_spacing=70 / height, horizontal_spacing=0.12)
    return plot.update_layout(margin_t=50)


def _has_rows(one: Measurement, array: str) -> bool:
    """Tell whether the array is there, with a row for each unit."""
    values = one.arrays.get(array)
    return values is not None and bool(one.units) and len(values) == len(one.units)


def _unit_name(one: Measurement, at: int) -> str:
    return escape_plotly(one.units[at].name)


def _middles(one: Measurement) -> Floats:
    edges: Floats = np.asarray(one.arrays["edges"], dtype=np.float64)
    return np.sqrt(edges[1:] * edges[:-1])


def _on_grid(one: Measurement, at: int) -> Floats:
    """Return a map without the NaNs that pad it to the size of the largest."""
    padded = finite(one.arrays["mean_norm"][at])
    known = ~np.isnan(padded)
    return padded[known.any(1)][:, known.any(0)]


def _distribution_table(found: Found) -> Table:
    rows = [
        (name, unit.name, unit.kind, float(norm), float(share))
        for name, one in found
        for unit, shares in zip(one.units, one.arrays["distribution"], strict=True)
        for norm, share in zip(_middles(one), shares, strict=True)
        if share > 0
    ]
    return Table(("network", "unit", "kind", "norm", "share"), rows)


def _maps_table(places: Sequence[tuple[str, Measurement, int]]) -> Table:
    rows = [
        (name, one.units[at].name, row, column, float(value))
        for name, one, at in places
        for (row, column), value in np.ndenumerate(_on_grid(one, at))
    ]
    return Table(("network", "unit", "row", "column", "mean_norm"), rows)
