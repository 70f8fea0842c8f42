"""Reach and density of attention by layer, each head a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import UnitRow
from vitclinic.reports.figure import (
    ExamView,
    Figure,
    draws,
    network_colour,
)
from vitclinic.reports.figures.canvas import GREY, Floats, trace_group
from vitclinic.reports.figures.depth import (
    Series,
    collect_series,
    overlay,
    places,
    read_heads,
    same_units,
    unit_names,
    unit_table,
)


def head_marks(found: Sequence[Series], array: str, divisor: str | None = None) -> list[go.Scatter]:
    """Return a dash for each head of each layer, divided by the value `divisor` of its layer if there is one."""
    shared = same_units(found)
    return [trace for one in found for trace in _marks(one, places(one, shared), array, divisor)]


def _marks(one: Series, x: Floats, array: str, divisor: str | None) -> list[go.Scatter]:
    values = read_heads(one.measurement, array)
    if values is None:
        return []
    rows = dict(zip((unit.depth for unit in one.measurement.units), values, strict=True))
    heads = np.stack([rows[unit.depth] / _divisor(unit, divisor) for unit in one.units])
    layers, numbers = np.nonzero(np.isfinite(heads))
    names = unit_names(one.units)
    return [
        go.Scatter(
            x=x[layers],
            y=heads[layers, numbers],
            mode="markers",
            marker={"size": 10, "symbol": "line-ew-open", "color": network_colour(one.place), "line": {"width": 1.2}},
            opacity=0.55,
            customdata=[(names[layer], int(head)) for layer, head in zip(layers, numbers, strict=True)],
            hovertemplate="%{customdata[0]}<br>head %{customdata[1]}: %{y:.4g}",
            **trace_group(one.place, one.label, shown=False),
        )
    ]


def _divisor(unit: UnitRow, name: str | None) -> float:
    if name is None:
        return 1.0
    return unit.values[name].value if name in unit.values else math.nan


@draws("attention_distance")
def attention_distance(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw how far attention looks, by layer and head."""
    found = collect_series(exams, "attention_distance", "distance")
    if not found:
        return []
    plot = overlay({"distance (sides of the grid)": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_distance"))
    plot.update_yaxes(rangemode="tozero")
    return [
        Figure(
            name="attention-distance-layers",
            title="Distance of attention by layer",
            reading="Each point is how far a query looks on average, rows and columns of the grid running from 0 to 1:"
            " 0 is every patch looking at itself, about 0.67 uniform attention; small dashes are heads. Divided by"
            " the number of other patches it is Hyeon-Woo et al.'s relative distance (in the table), which Context"
            " Broadcasting should leave as it is.",
            paper="Hyeon-Woo et al. 2023, Fig. 7b (H2)",
            table=unit_table(exams, "attention_distance", ["distance", "relative_distance"], heads="head_distance"),
            plot=plot,
        )
    ]


@draws("attention_entropy")
def attention_entropy(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the entropy of attention by layer and head, and that of the class token."""
    return [*_against_maximum(exams), *_of_class_token(exams)]


def _against_maximum(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "attention_entropy", "ratio")
    if not found:
        return []
    plot = overlay({"entropy / maximum": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_entropy", divisor="maximum"))
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    plot.add_hline(y=1, line=line, annotation={"text": "uniform attention", "yanchor": "bottom", "font": {"size": 11}})
    return [
        Figure(
            name="attention-entropy-layers",
            title="Entropy of attention by layer",
            reading="Each point is the mean entropy of a layer's attention, divided by that of uniform attention over"
            " the same keys; small dashes are its heads. Hyeon-Woo et al. found learned attention close to the"
            " maximum, which is attention that merely averages.",
            paper="Hyeon-Woo et al. 2023, Fig. 4 (H1)",
            table=unit_table(
                exams, "attention_entropy", ["ratio", "entropy", "upper", "maximum"], heads="head_entropy"
            ),
            plot=plot,
        )
    ]


def _of_class_token(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "attention_entropy", "class_entropy")
    if not found:
        return []
    return [
        Figure(
            name="attention-entropy-class",
            title="Entropy of the class token's attention",
            reading="Each point is the entropy of the class token's attention in one layer, mean over heads and"
            " images: the lower, the fewer patches it looks at. Hyeon-Woo et al. found that Context Broadcasting"
            " lowers it, most in deep layers.",
            paper="Hyeon-Woo et al. 2023, Fig. 7a (H2)",
            table=unit_table(exams, "attention_entropy", ["class_entropy", "patch_entropy"]),
            plot=overlay({"entropy (nats)": found}, "attention layer"),
        )
    ]
