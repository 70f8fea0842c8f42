"""A run's metrics over its steps, and its course through the space of weights in polar coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vitclinic.reports.figure import ExamView, Figure, Table, draws, escape_plotly, network_colour, select_usable
from vitclinic.reports.figures.canvas import (
    LEGEND_LINE,
    Floats,
    Measurements,
    band,
    error_bars,
    finite,
    label,
    line,
    line_style,
    make_canvas,
    marker_style,
    scale_for,
    trace_group,
)
from vitclinic.reports.figures.dense import COLOURS

POINTS = 300
"""At most so many on a curve; of more steps, each point stands for several."""
_EXPLODED = 10.0
"""As training has it: a loss of so many times the first is a divergence."""


@dataclass(frozen=True)
class Curve:
    """A value over steps, in groups of steps: the mean of each, its least and its greatest."""

    step: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Panel:
    """A row of the figure: its title and its metrics."""

    kind: str
    key: str
    title: str


_PANELS = (
    Panel("train", "loss", "loss"),
    Panel("val", "accuracy", "accuracy on val"),
    Panel("val", "miou", "mean IoU on val"),
    Panel("val", "ap", "AP on val"),
    Panel("train", "grad_norm", "gradient norm"),
    Panel("train", "lr", "learning rate"),
)


_SCORES = ("accuracy", "miou", "ap")
"""Panels of scores on val, each with its interval if the rows have one."""
_CLASS_SCORES = {"iou": "IoU on val", "class_ap": "AP on val"}
"""What validations have of each class."""


@draws("training")
def training(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw loss, accuracy, gradient norm and learning rate over steps."""
    found = [(place, one) for place, one in enumerate(exams) if _series(one, "train", "loss") is not None]
    if not found:
        return []
    panels = [panel for panel in _PANELS if any(_series(one, panel.kind, panel.key) for _, one in found)]
    return [
        Figure(
            name="training",
            title="Training curves",
            reading="Loss of the training batches (line: the mean of some steps; band: from their lowest to their"
            " highest) and on val (markers), then accuracy, gradient norm and learning rate, over the same steps. A val"
            " loss that turns up while the training loss falls is overfitting; a vertical line marks a divergence.",
            paper="Chen et al. 2022, Fig. 2",
            table=_table(found),
            plot=_plot(found, panels),
        ),
        *_by_class([one for _, one in found]),
    ]


def _by_class(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the score of each class on val over steps, a panel a network, for tasks that score classes apart."""
    found = [(one, score) for one in exams for score in _CLASS_SCORES if _class_rows(one, score)]
    if not found:
        return []
    rows = [(one.name, score, *row) for one, score in found for row in _class_rows(one, score)]
    return [
        Figure(
            name="training-classes",
            title="Classes over training",
            reading="Each line is a class on val, with its colour in the pictures of masks and boxes: its IoU, or the"
            " AP of its boxes. A class that stays at 0 while others rise is too rare or too small to be learned in this"
            " time; one that falls while others rise is given up for them.",
            table=Table(("network", "score", "step", "class", "value"), rows),
            paper="Hyeon-Woo et al. 2023, Tables 6, 7",
            plot=_plot_classes(found),
        )
    ]


def _class_rows(one: ExamView, score: str) -> list[tuple[float, str, float | None]]:
    """Return step, class and score of each validation; None where a class is nowhere."""
    return [
        (float(row["step"]), str(name), None if math.isnan(_number(value)) else float(value))
        for row in one.training
        if row.get("kind") == "val" and "step" in row and isinstance(row.get(score), Mapping)
        for name, value in row[score].items()
    ]


def _plot_classes(found: Sequence[tuple[ExamView, str]]) -> go.Figure:
    of_classes = [list(dict.fromkeys(name for _, name, _ in _class_rows(one, score))) for one, score in found]
    everything = list(dict.fromkeys(name for names in of_classes for name in names))
    figure = make_canvas(70 + 230 * len(found), len(found), legend=len(everything), vertical_spacing=0.12 / len(found))
    named: set[str] = set()
    for place, ((one, score), names) in enumerate(zip(found, of_classes, strict=True), start=1):
        rows = _class_rows(one, score)
        for number, name in enumerate(names):
            points = [(step, value) for step, of_class, value in rows if of_class == name]
            colour = "rgb({},{},{})".format(*COLOURS[number % len(COLOURS)])
            trace = go.Scatter(
                x=[step for step, _ in points],
                y=[value for _, value in points],
                mode="lines+markers",
                name=escape_plotly(name),
                line={"color": colour, "width": 1.5},
                marker={"size": 5},
                legendgroup=name,
                showlegend=name not in named,
                hovertemplate=f"{escape_plotly(name)}, step %{{x}}: %{{y:.1%}}",
            )
            figure.add_trace(trace, place, 1)
            named.add(name)
        title = f"{_CLASS_SCORES[score]}, {escape_plotly(one.name)}" if len(found) > 1 else _CLASS_SCORES[score]
        figure.update_yaxes(title_text=title, tickformat=".0%", range=[0, 1], row=place, col=1)
    figure.update_xaxes(title_text="step", row=len(found), col=1)
    return figure


def _series(one: ExamView, kind: str, key: str) -> tuple[Floats, Floats] | None:
    """Return steps and values of one metric, NaN where one is not finite; None where no row has it."""
    rows = [row for row in one.training if row.get("kind") == kind and "step" in row and key in row]
    values = np.array([_number(row[key]) for row in rows])
    if not rows or np.isnan(values).all():
        return None
    return np.array([float(row["step"]) for row in rows]), values


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def thin(step: Floats, values: Floats, points: int = POINTS) -> Curve:
    """Return at most so many points, each of the values in a range of steps."""
    groups = np.array_split(np.arange(len(step)), min(points, len(step)))
    known = [values[group][~np.isnan(values[group])] for group in groups]

    def each(statistic: Callable[[Floats], Any]) -> Floats:
        return np.array([float(statistic(found)) if found.size else math.nan for found in known])

    return Curve(np.array([step[group[-1]] for group in groups]), each(np.mean), each(np.min), each(np.max))


def divergence(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the step at which the loss was not finite, or ten times the first; None if it never was."""
    losses = [row for row in rows if row.get("kind") in ("train", "val") and "loss" in row]
    first = next((_number(row["loss"]) for row in losses if row["kind"] == "train"), math.nan)
    limit = _EXPLODED * max(abs(first), 1.0)
    for row in losses:
        loss = _number(row["loss"])
        if math.isnan(loss) or (row["kind"] == "train" and loss > limit):
            return float(row.get("step", 0))
    return None


def _plot(found: Sequence[tuple[int, ExamView]], panels: Sequence[Panel]) -> go.Figure:
    heights = [2.0 if panel.key == "loss" else 1.0 for panel in panels]
    height = 60 + 135 * int(sum(heights))
    spacing = 26 / height
    figure = make_canvas(
        height, len(panels), legend=len(found), shared_xaxes=True, row_heights=heights, vertical_spacing=spacing
    )
    for row, panel in enumerate(panels, start=1):
        everything: list[float] = []
        for place, one in found:
            for trace in _traces(place, one, panel, shown=row == 1):
                figure.add_trace(trace, row, 1)
                everything += [float(y) for y in trace.y]
        if panel.key in ("loss", "grad_norm"):
            axis = scale_for(everything, panel.title, to_zero=panel.key != "loss")
        else:
            tickformat = ".0%" if panel.key in _SCORES else None
            axis = {"title_text": panel.title, "rangemode": "tozero", "tickformat": tickformat}
        figure.update_yaxes(**axis, row=row, col=1)
    for place, one in found:
        if (step := divergence(one.training)) is not None:
            figure.add_vline(x=step, line={"color": network_colour(place), "dash": "dash", "width": 1.5})
            figure.update_layout(margin_t=26)
            at = {"x": step, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
            figure.add_annotation(text="diverged", font={"color": network_colour(place), "size": 12}, **at)
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    return figure


def _traces(place: int, one: ExamView, panel: Panel, shown: bool) -> list[go.Scatter]:
    text = label(one.name)
    traces = []
    series = _series(one, panel.kind, panel.key)
    if panel.key in _SCORES:
        return [] if series is None else [_validation(place, one, panel.key, text, shown)]
    if series is not None:
        curve = thin(*series)
        if panel.key != "lr" and len(series[0]) > len(curve.step):
            traces.append(band(place, curve.step, curve.low, curve.high))
        traces.append(
            go.Scatter(
                x=curve.step,
                y=finite(curve.mean),
                mode="lines",
                line=line_style(place) | {"width": 1.5},
                hovertemplate=f"step %{{x}}: {panel.title} %{{y:.4g}}",
                **trace_group(place, text, shown),
            )
        )
    if panel.key == "loss" and _series(one, "val", "loss") is not None:
        traces.append(_validation(place, one, "loss", text, shown=False))
    return traces


def _validation(place: int, one: ExamView, key: str, text: str, shown: bool) -> go.Scatter:
    series = _series(one, "val", key)
    assert series is not None
    step, values = series
    options: dict[str, Any] = {"hovertemplate": f"step %{{x}}: val {key} %{{y:.4g}}", "marker": marker_style(place, 8)}
    if key in _SCORES:
        ends = [_series(one, "val", f"{key}_{end}") for end in ("low", "high")]
        if all(end is not None and len(end[1]) == len(values) for end in ends):
            low, high = (end[1] for end in ends if end is not None)
            options["error_y"] = error_bars(values, low, high, place)
    return line(place, text, step, values, shown, line=line_style(place) | {"width": 1}, **options)


def _table(found: Sequence[tuple[int, ExamView]]) -> Table:
    """Return the points drawn, with what each of them stands for."""
    rows = []
    for _, one in found:
        for kind, key in [(panel.kind, panel.key) for panel in _PANELS] + [("val", "loss")]:
            series = _series(one, kind, key)
            if series is None:
                continue
            curve = thin(*series)
            columns = (each.tolist() for each in (curve.step, curve.mean, curve.low, curve.high))
            rows += [(one.name, kind, key, *row) for row in zip(*columns, strict=True)]
        if (step := divergence(one.training)) is not None:
            rows.append((one.name, "train", "divergence", step, None, None, None))
    return Table(("network", "kind", "metric", "step", "mean", "lowest", "highest"), rows)


_ARRAYS = ("epoch", "radius", "angle", "radius_error", "angle_error")


@draws("trajectory")
def trajectory(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw each network's course to where its training ended."""
    found = [each for each in select_usable(exams, "trajectory") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        rows += [(name, *row) for row in zip(*(one.arrays[array].tolist() for array in _ARRAYS), strict=True)]
    return [
        Figure(
            name="trajectory",
            title="Course of the training",
            reading="The weights after each kept epoch, seen from where the training ended, in the middle: how far they"
            " still are, as a share of the whole way, and in which direction, against that of the start, at radius 1"
            " and angle 0. A straight path keeps its angle at 0; each network has axes of its own.",
            paper="Park and Kim 2022, Fig. 1b (P15)",
            table=Table(("network", *_ARRAYS), rows),
            plot=_trajectory_plot(found),
        )
    ]


def _trajectory_plot(found: Measurements) -> go.Figure:
    figure = make_canvas(440, legend=2 * len(found), specs=[[{"type": "polar"}]])
    farthest, widest = 1.0, 0.0
    for place, name, one in found:
        epoch, radius, angle = (finite(one.arrays[array]) for array in _ARRAYS[:3])
        path = go.Scatterpolar(
            r=[*radius, 0.0],
            theta=np.degrees([*angle, angle[-1] if len(angle) else 0.0]),
            customdata=[*(f"epoch {at:g}" for at in epoch), "end"],
            mode="lines+markers",
            line=line_style(place),
            marker=marker_style(place),
            hovertemplate="%{customdata}: r %{r:.3f}, %{theta:.1f}°",
            **trace_group(place, label(name, one, f"largest angle {_degrees(one.scalars.get('angle_max'))}")),
        )
        figure.add_trace(path)
        farthest = max(farthest, float(np.nanmax(radius, initial=0)))
        widest = max(widest, float(np.nanmax(np.degrees(angle), initial=0)))
    below = 44 + 2 * LEGEND_LINE  # the axis is below the circle, and the legend below the axis
    figure.update_layout(margin={"l": 44, "r": 44, "t": 34, "b": below})  # the labels of the angles are outside
    figure.update_polars(
        sector=[0, 90 if widest <= 90 else 180],
        radialaxis={"range": [0, 1.05 * farthest], "title": {"text": "distance r"}, "angle": 0, "tickangle": 0},
        angularaxis={"ticksuffix": "°", "dtick": 15},
    )
    return figure


def _degrees(scalar: object) -> str:
    value = getattr(scalar, "value", None)
    return "unknown" if value is None else f"{np.degrees(value):.0f}°"
