"""Figures of a study: its comparisons, each seed a point, and every measure by arm."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from vitclinic.reports.figure import Figure, Table, escape_plotly, format_number, network_colour
from vitclinic.reports.figures.canvas import GREY, error_bars, make_canvas
from vitclinic.reports.study_result import ArmNumbers, StoredComparison, StoredResult

STATUS_COLOURS = {"as claimed": "#009E73", "opposite": "#D55E00", "undecided": "#7A7A7A"}
CLAIMED_SIDE = "rgba(0, 158, 115, 0.12)"
PANEL, ROW, LINE = 56, 34, 17
"""Pixels of a comparison's panel, of an arm's row, and of a line of text."""
TITLE_WIDTH, ARM_WIDTH, LONGEST = 44, 20, 90
"""Characters in a line above a panel or beside a row, for a phone; and of a name before it is cut."""


def comparisons_figure(result: StoredResult) -> Figure:
    """Draw a panel for each comparison: every seed's number, the mean with its interval, and the claimed side."""
    compared = result.comparisons
    titles = [f"{_lines(one.says, TITLE_WIDTH)}: <b>{one.status}</b>" for one in compared]
    above = LINE * (1 + max(title.count("<br>") for title in titles)) + 12
    below = LINE * (1 + max(_axis_title(one).count("<br>") for one in compared)) + 34
    rows = len(compared)
    inside = PANEL * rows + (above + below) * (rows - 1)
    between = (above + below) / inside if rows > 1 else 0.0
    plot = make_canvas(inside + above + below, rows, titles=titles, vertical_spacing=between)
    plot.update_layout(showlegend=False, margin={"t": above, "b": below})
    plot.update_annotations(x=0, xanchor="left", align="left")
    for row, one in enumerate(compared, 1):
        _panel(plot, row, one)
    plot.update_yaxes(visible=False, range=[-0.9, 1.7], fixedrange=True)
    return Figure(
        name="comparisons",
        title="Comparisons, seed by seed",
        reading=(
            "Small points are seeds: one arm less the other with the same seed, or the slope of a trend. The diamond is"
            f" their mean with its {result.confidence:.4g}% interval; a comparison is as claimed if the whole interval"
            " lies in the shaded side, and opposite if it lies in the other."
        ),
        paper=f"{result.paper}, {result.source}",
        table=Table(
            ("comparison", "measure", "seed", "number"),
            [(one.says, one.measure, seed, value) for one in compared for seed, value in one.numbers.items()],
        ),
        plot=plot,
    )


def _panel(plot: go.Figure, row: int, one: StoredComparison) -> None:
    known = {seed: value for seed, value in one.numbers.items() if math.isfinite(value)}
    low, high = _range([*known.values(), one.mean, one.low, one.high, one.than])
    edges = (one.than, high) if one.direction > 0 else (low, one.than)
    axes = {"xref": f"x{row}" if row > 1 else "x", "yref": f"y{row} domain" if row > 1 else "y domain"}
    plot.add_shape(
        type="rect", x0=edges[0], x1=edges[1], y0=0, y1=1, fillcolor=CLAIMED_SIDE, line_width=0, layer="below", **axes
    )
    plot.add_shape(type="line", x0=one.than, x1=one.than, y0=0, y1=1, line={"color": GREY, "width": 1}, **axes)
    colour = STATUS_COLOURS[one.status]
    plot.add_trace(_seeds(known, 0.0, colour), row, 1)
    if math.isfinite(one.mean):
        plot.add_trace(_mean(one.mean, one.low, one.high, 1.0, colour), row, 1)
    else:
        plot.add_annotation(text="no seed has a number", x=one.than, y=0.5, showarrow=False, row=row, col=1)
    plot.update_xaxes(range=[low, high], nticks=6, title_text=_axis_title(one), row=row, col=1)


def _axis_title(one: StoredComparison) -> str:
    return _lines(f"{one.measure}: {one.terms}", TITLE_WIDTH)


def measure_figure(result: StoredResult, measure: str, place: int) -> Figure:
    """Draw one measure: a row for each arm, every run a point, the mean with its interval."""
    arms = result.measures[measure]
    labels = [_lines(arm, ARM_WIDTH) for arm in arms]
    plot = make_canvas(70 + sum(ROW + LINE * label.count("<br>") for label in labels))
    for at, arm in enumerate(arms.values()):
        known = {seed: value for seed, value in arm.numbers.items() if math.isfinite(value)}
        plot.add_trace(_seeds(known, at + 0.12, network_colour(at)))
        if math.isfinite(arm.mean):
            low, high = arm.interval or (math.nan, math.nan)
            plot.add_trace(_mean(arm.mean, low, high, at - 0.2, network_colour(at)))
    plot.update_layout(showlegend=False)
    plot.update_xaxes(title_text=escape_plotly(measure))
    if _share(arms):
        plot.update_xaxes(range=[-0.05, 1.05], tickformat=".0%")
    plot.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=labels, range=[len(labels) - 0.4, -0.6], showgrid=False
    )
    interval = "Wilson's" if _share(arms) else "Student's"
    return Figure(
        name=f"measure-{place}",
        title=f"{measure} by arm",
        reading=(
            f"Small points are runs, the diamond above them is their mean with {interval} 95% interval. Arms are paired"
            " by seed, so that intervals that overlap here may still belong to a difference that is clear above."
        ),
        paper="",
        table=Table(
            ("arm", "seed", measure),
            [(name, seed, value) for name, arm in arms.items() for seed, value in arm.numbers.items()],
        ),
        plot=plot,
    )


def _share(arms: Mapping[str, ArmNumbers]) -> bool:
    return any(arm.share for arm in arms.values())


def _seeds(known: Mapping[int, float], at: float, colour: str) -> go.Scatter:
    """Return one point a seed, spread a little so that equal ones are seen."""
    spread = [at + 0.16 * (place % 3 - 1) for place in range(len(known))]
    return go.Scatter(
        x=list(known.values()),
        y=spread,
        mode="markers",
        marker={"color": colour, "size": 7, "opacity": 0.65},
        text=[f"seed {seed}" for seed in known],
        hovertemplate="%{text}: %{x:.4g}<extra></extra>",
    )


def _mean(mean: float, low: float, high: float, at: float, colour: str) -> go.Scatter:
    bars = error_bars([mean], [low], [high])
    ends = {key: bars[key].tolist() for key in ("array", "arrayminus")}
    span = "" if math.isnan(low) else f" [{format_number(low)}, {format_number(high)}]"
    return go.Scatter(
        x=[mean],
        y=[at],
        mode="markers",
        marker={"color": colour, "size": 11, "symbol": "diamond"},
        error_x={**bars, **ends, "color": colour, "thickness": 2, "width": 5},
        hovertemplate=f"mean {format_number(mean)}{span}<extra></extra>",
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that holds all of these, with some room on both sides."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known), max(known)
    room = 0.12 * (high - low) or 1.0
    return low - room, high + room


def _lines(text: str, width: int) -> str:
    """Return a name in lines for plotly, cut where it is too long."""
    cut = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    lines = textwrap.wrap(cut, width) or [""]
    return "<br>".join(map(escape_plotly, lines))
