"""Accuracy under each corruption at each severity, and an image under each of them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Picture, Table, draws, select_usable
from vitclinic.reports.figures.canvas import (
    COLOUR_BAR_HEIGHT,
    PANEL_LONGEST,
    finite,
    format_scalar,
    label,
    line,
    make_canvas,
    put_colours_below,
)
from vitclinic.reports.figures.scalars import Measurements
from vitclinic.reports.formatting import escape_plotly
from vitclinic.reports.theme import SEQUENTIAL

_PREFIX = "accuracy_"
_PAPER = "Park and Kim 2022, Fig. 12b (P11); Hendrycks and Dietterich 2019"


@draws("corruptions")
def corruptions(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw accuracy by corruption and severity, and its mean by severity."""
    found = [each for each in select_usable(exams, "corruptions") if _is_whole(each[2])]
    if not found:
        return []
    table = _table(found)
    heat = Figure(
        name="corruptions",
        title="Accuracy by corruption and severity",
        reading="Each cell is the accuracy in percent under one corruption at one severity, from 1 (mild) to 5, all"
        " panels on one scale of colours. Compare cells across networks, which saw the same corrupted images; the"
        " pictures show the first of these at severity 3.",
        paper=_PAPER,
        table=table,
        plot=_heat(found),
        pictures=_samples(found[0][2]),
    )
    slope = Figure(
        name="corruptions-severity",
        title="Accuracy by severity",
        reading="The mean accuracy over all corruptions of one severity, severity 0 being the images as they are. A"
        " network whose curve falls less is more robust; where it starts is its clean accuracy.",
        paper=_PAPER,
        table=table,
        plot=_slope(found),
    )
    return [heat, slope]


def _names(measurement: Measurement) -> list[str]:
    """Return the corruptions, in the order of the arrays' rows."""
    return [key.removeprefix(_PREFIX) for key in measurement.scalars if key.startswith(_PREFIX)]


def _is_whole(measurement: Measurement) -> bool:
    accuracy = measurement.arrays.get("accuracy")
    return accuracy is not None and accuracy.ndim == 2 and len(_names(measurement)) == len(accuracy)


def _severities(measurement: Measurement) -> list[int]:
    return list(range(1, measurement.arrays["accuracy"].shape[1] + 1))


def _table(found: Measurements) -> Table:
    rows = []
    for _, name, one in found:
        clean = one.scalars.get("clean_accuracy")
        if clean is not None:
            rows.append((name, "clean", 0, clean.value, clean.low, clean.high))
        nothing = np.full_like(one.arrays["accuracy"], np.nan)
        cells = np.stack([one.arrays["accuracy"], *(one.arrays.get(end, nothing) for end in ("low", "high"))], axis=-1)
        for corruption, by_severity in zip(_names(one), cells.tolist(), strict=True):
            rows += [(name, corruption, s, *cell) for s, cell in zip(_severities(one), by_severity, strict=True)]
    return Table(("network", "corruption", "severity", "accuracy", "low", "high"), rows)


def _heat(found: Measurements) -> go.Figure:
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    most = max(len(_names(one)) for _, _, one in found)
    titles = [label(name, longest=PANEL_LONGEST) for _, name, _ in found]
    height = rows * (22 * most + 56) + COLOUR_BAR_HEIGHT
    spacing = 56 / height
    figure = make_canvas(
        height, rows, columns, titles, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=spacing
    )
    for at, (_, _, one) in enumerate(found):
        accuracy = finite(one.arrays["accuracy"])
        heat = go.Heatmap(
            x=_severities(one),
            y=[escape_plotly(name.replace("_", " ")) for name in _names(one)],
            z=accuracy,
            text=100 * accuracy,
            texttemplate="%{text:.0f}",
            textfont={"size": 10},
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            hovertemplate="%{y}, severity %{x}: %{z:.1%}<extra></extra>",
        )
        figure.add_trace(heat, at // columns + 1, at % columns + 1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False, dtick=1)
    title = "accuracy, by severity 1 to 5"
    put_colours_below(figure, title, colorscale=SEQUENTIAL, colorbar={"tickformat": ".0%"})
    return figure


def _slope(found: Measurements) -> go.Figure:
    figure = make_canvas(320, legend=2 * len(found))
    for place, name, one in found:
        clean = one.scalars.get("clean_accuracy")
        means = finite(one.arrays["accuracy"]).mean(0)
        x = _severities(one) if clean is None else [0, *_severities(one)]
        y = means if clean is None else [clean.value, *means]
        text = label(name, one, format_scalar(one.scalars.get("accuracy"), ".1%"))
        figure.add_trace(line(place, text, x, y, hovertemplate="severity %{x}: %{y:.1%}"))
    figure.update_xaxes(title_text="severity", dtick=1)
    figure.update_yaxes(title_text="mean accuracy", tickformat=".0%", rangemode="tozero")
    return figure


def _samples(measurement: Measurement) -> list[Picture]:
    """Return one image as it is and under each corruption, if the measurement has kept them."""
    samples = measurement.arrays.get("samples")
    names = ["clean", *_names(measurement)]
    if samples is None or len(samples) != len(names):
        return []
    return [Picture(name.replace("_", " "), _png(sample)) for name, sample in zip(names, samples, strict=True)]


def _png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, format="PNG")
    return buffer.getvalue()
