"""Likelihood of the training images, alone and against the error on test images."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic.measurement import Scalar
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import COLUMNS, Measured, beside, known, scalar_table
from vitclinic.reports.figures.drawing import canvas, ends, error_bars, finite, label, marker_style, of_one

_GROUPS = {"nll": "training NLL", "target_entropy": "least possible"}


@draws("train_nll")
def train_nll(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "train_nll")
    groups = known(found, _GROUPS)
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
            plot=beside(found, groups, "NLL, nats"),
        )
    ]
    both = [(place, name, one) for place, name, one in found if "nll" in one.scalars and _error(examined[place])]
    return figures if len(both) < 2 else [*figures, _against_error(examined, both)]


def _error(one: Examined) -> Scalar | None:
    """The share of test images that are not recognised, where it has been measured."""
    accuracy = one.measurements.get("accuracy")
    found = None if accuracy is None else accuracy.scalars.get("accuracy")
    if found is None:
        return None
    low, high = (None if end is None else 1 - end for end in (found.high, found.low))
    return Scalar(value=1 - found.value, low=low, high=high, n=found.n)


def _against_error(examined: Sequence[Examined], found: Measured) -> Figure:
    figure = canvas(340, legend=len(found))
    rows = []
    for place, name, one in found:
        nll, error = one.scalars["nll"], _error(examined[place])
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
                **of_one(place, label(name, one)),
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
