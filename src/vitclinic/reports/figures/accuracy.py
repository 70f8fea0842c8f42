"""Accuracy and calibration (reliability diagram), and the likelihood of training images against the test error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView, Figure, Table, draws, network_colour, select_usable, with_opacity
from vitclinic.reports.figures.canvas import (
    COLUMNS,
    GREY,
    Measurements,
    compare_scalars,
    ends,
    error_bars,
    finite,
    format_scalar,
    label,
    line,
    make_canvas,
    marker_style,
    scalar_table,
    select_known,
    trace_group,
)

_ARRAYS = ("bin_edges", "bin_images", "bin_confidence", "bin_accuracy", "bin_accuracy_low", "bin_accuracy_high")


@draws("accuracy")
def accuracy(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the reliability diagram."""
    found = [each for each in select_usable(exams, "accuracy") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        edges, *values = (one.arrays[array].tolist() for array in _ARRAYS)
        rows += [(name, *row) for row in zip(edges[:-1], edges[1:], *values, strict=True)]
    columns = ("network", "confidence_from", "confidence_to", *(array.removeprefix("bin_") for array in _ARRAYS[1:]))
    return [
        Figure(
            name="reliability",
            title="Reliability diagram",
            reading="Above, the accuracy of the images of each range of confidence, with 95% intervals, against their"
            " mean confidence; below, the share of the images in that range. A calibrated network is on the diagonal,"
            " an over-confident one below it; the ECE is the mean distance from it, over images.",
            paper="Park and Kim 2022, Fig. F.1a (P13); Guo et al. 2017",
            table=Table(columns, rows),
            plot=_plot(found),
        )
    ]


def _plot(found: Measurements) -> go.Figure:
    figure = make_canvas(
        480, 2, legend=2 * len(found), shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.05
    )
    diagonal = go.Scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "dash": "dot"}, hoverinfo="skip", showlegend=False
    )
    figure.add_trace(diagonal, 1, 1)
    for place, name, one in found:
        edges, images, confidence, right, low, high = (one.arrays[array] for array in _ARRAYS)
        text = label(name, one, f"ECE {format_scalar(one.scalars.get('ece'), '.1%')}")
        curve = line(
            place,
            text,
            confidence,
            right,
            error_y=error_bars(right, low, high, place),
            connectgaps=True,
            hovertemplate="confidence %{x:.1%}, accuracy %{y:.1%}",
        )
        figure.add_trace(curve, 1, 1)
        shares = images / max(1, int(images.sum()))
        steps = go.Scatter(
            x=np.repeat(finite(edges), 2),
            y=np.concatenate([[0], np.repeat(shares, 2), [0]]),
            mode="lines",
            line={"color": network_colour(place), "width": 1.5},
            fill="tozeroy",
            fillcolor=with_opacity(place, 0.15),
            hovertemplate="%{y:.1%} of the images",
            **trace_group(place, text, shown=False),
        )
        figure.add_trace(steps, 2, 1)
    figure.update_xaxes(range=[-0.01, 1.02], tickformat=".0%")
    figure.update_xaxes(title_text="confidence", row=2, col=1)
    figure.update_yaxes(title_text="accuracy", tickformat=".0%", range=[-0.02, 1.04], row=1, col=1)
    figure.update_yaxes(title_text="images", tickformat=".0%", rangemode="tozero", row=2, col=1)
    return figure


_GROUPS = {"nll": "training NLL", "target_entropy": "least possible"}


@draws("train_nll")
def train_nll(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the likelihood of training images and, of several networks, that against the test error."""
    found = select_usable(exams, "train_nll")
    groups = select_known(found, _GROUPS)
    if not groups:
        return []
    figures = [
        Figure(
            name="train-nll",
            title="Likelihood of the training images",
            reading="The upper bar is the negative log-likelihood of the training images as training shows them, with"
            " its 95% interval; the lower is the entropy of the targets, which it cannot fall below. A low bar with a"
            " high error on test images is overfitting; a high one says that the network could not fit.",
            paper="Park and Kim 2022, Fig. 5, 7a (P5)",
            table=scalar_table(found, groups),
            plot=compare_scalars(found, groups, "NLL, nats"),
        )
    ]
    both = [(place, name, one) for place, name, one in found if "nll" in one.scalars and _error(exams[place])]
    return figures if len(both) < 2 else [*figures, _against_error(exams, both)]


def _error(one: ExamView) -> Scalar | None:
    """Return the share of test images that are not recognized, where it was measured."""
    accuracy = one.measurements.get("accuracy")
    found = None if accuracy is None else accuracy.scalars.get("accuracy")
    if found is None:
        return None
    low, high = (None if end is None else 1 - end for end in (found.high, found.low))
    return Scalar(value=1 - found.value, low=low, high=high, n=found.n)


def _against_error(exams: Sequence[ExamView], found: Measurements) -> Figure:
    figure = make_canvas(340, legend=len(found))
    rows = []
    for place, name, one in found:
        nll, error = one.scalars["nll"], _error(exams[place])
        assert error is not None
        (x, x_low, x_high), (y, y_low, y_high) = ends([nll]), ends([error])
        figure.add_trace(
            go.Scatter(
                x=finite(x),
                y=finite(y),
                error_x=error_bars(x, x_low, x_high, place),
                error_y=error_bars(y, y_low, y_high, place),
                mode="markers",
                marker=marker_style(place, 11),
                hovertemplate="NLL %{x:.3g}, error %{y:.1%}",
                **trace_group(place, label(name, one)),
            )
        )
        rows += [(name, key, s.value, s.low, s.high, s.n) for key, s in (("nll", nll), ("test_error", error))]
    figure.update_xaxes(title_text="training NLL, nats")
    figure.update_yaxes(title_text="error on test images", tickformat=".0%")
    return Figure(
        name="train-nll-error",
        title="Fit against generalisation",
        reading="Each point is a network: how badly it fits its training images (to the right) and how often it fails"
        " on test images (up), with 95% intervals. Down and left is better at both; up and left is overfitting; compare"
        " only networks of one augmentation.",
        paper="Park and Kim 2022, Fig. 5a (P5)",
        table=Table(COLUMNS, rows),
        plot=figure,
    )
