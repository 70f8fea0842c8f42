"""Figures of behaviour, cost, norms and training show the measured numbers."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import vitclinic.reports.figures  # noqa: F401
from tests.reports.figures.probed import changed, course, pair
from tests.reports.figures.test_curvature import drawn, of_network
from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView
from vitclinic.reports.figures import draw
from vitclinic.reports.figures.dense import COLOURS
from vitclinic.reports.figures.training import POINTS, divergence, thin

BARS = {
    "missing_rate": ("missing-rate", {"all pairs": "missing_rate", "two classes": "missing_rate_different_classes"}),
    "occlusion": ("occlusion", {"whole images": "clean_accuracy", "centre hidden": "accuracy", "lost": "drop"}),
    "shift": ("shift", {"among all outputs": "accuracy", "among the set's": "accuracy_among_mapped"}),
    "fgsm": ("fgsm", {"clean": "clean_accuracy", "random noise": "noise_accuracy", "FGSM": "robust_accuracy"}),
    "pgd": ("pgd", {"clean": "clean_accuracy", "PGD": "robust_accuracy"}),
    "train_nll": ("train-nll", {"training NLL": "nll", "least possible": "target_entropy"}),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("probe", BARS)
def test_bars_are_the_scalars_with_their_intervals(probe: str, place: int) -> None:
    name, groups = BARS[probe]
    figure, measured = drawn(probe, name), pair()[place].measurements[probe]
    bar = of_network(figure, place)[0]
    for title, key in groups.items():
        at, scalar = list(bar.y).index(title), measured.scalars[key]
        value = bar.x[at]
        assert value == scalar.value
        low, high = value - bar.error_x.arrayminus[at], value + bar.error_x.array[at]
        assert (low, high) == pytest.approx((scalar.low, scalar.high))
        row = (pair()[place].name, key, scalar.value, scalar.low, scalar.high, scalar.n)
        assert row in list(figure.table.rows)


def test_values_of_several_orders_are_points_on_a_logarithmic_axis() -> None:
    def with_nll(place: int, value: float):
        scalars = {"nll": Scalar(value=value, low=0.9 * value, high=1.1 * value, n=5)}
        return changed(pair()[place], "train_nll", scalars=scalars)

    figure = draw("train_nll", [with_nll(0, 0.001), with_nll(1, 2.0)])[0]
    assert figure.plot.layout.xaxis.type == "log"
    assert {trace.type for trace in figure.plot.data} == {"scatter"}
    near = draw("train_nll", [with_nll(0, 1.0), with_nll(1, 2.0)])[0]
    assert near.plot.layout.xaxis.type == "linear"
    assert near.plot.data[0].type == "bar"


def test_attacks_of_different_sizes_are_told_apart() -> None:
    scalars = pair()[1].measurements["fgsm"].scalars | {"epsilon": Scalar(value=8 / 255)}
    (figure,) = draw("fgsm", [pair()[0], changed(pair()[1], "fgsm", scalars=scalars)])
    assert "2/255" in figure.title
    assert "8/255" in figure.title
    assert [t.name.split(", ")[1] for t in figure.plot.data if t.type == "bar"] == ["2/255 in l∞", "8/255 in l∞"]
    assert {row[0] for row in figure.table.rows} == {"vit", "resnet"}


def test_fit_is_drawn_against_the_error_of_the_same_network() -> None:
    figure = drawn("train_nll", "train-nll-error")
    for place, one in enumerate(pair()):
        (point,) = of_network(figure, place)
        assert point.x[0] == one.measurements["train_nll"].scalars["nll"].value
        assert point.y[0] == 1 - one.measurements["accuracy"].scalars["accuracy"].value
    alone = [replace(one, measurements={"train_nll": one.measurements["train_nll"]}) for one in pair()]
    assert [figure.name for figure in draw("train_nll", alone)] == ["train-nll"]


@pytest.mark.parametrize("place", [0, 1])
def test_the_reliability_diagram_is_that_of_the_bins(place: int) -> None:
    figure, measured = drawn("accuracy"), pair()[place].measurements["accuracy"]
    curve, shares = of_network(figure, place)
    np.testing.assert_array_equal(curve.x, measured.arrays["bin_confidence"])
    np.testing.assert_array_equal(curve.y, measured.arrays["bin_accuracy"])
    filled = ~np.isnan(measured.arrays["bin_accuracy"])
    high = curve.y + curve.error_y.array
    np.testing.assert_allclose(high[filled], measured.arrays["bin_accuracy_high"][filled])
    assert np.sum(shares.y[1:-1:2]) == pytest.approx(1)
    diagonal = figure.plot.data[0]
    assert (list(diagonal.x), list(diagonal.y)) == ([0, 1], [0, 1])
    assert f"ECE {measured.scalars['ece'].value:.1%}" in curve.name


@pytest.mark.parametrize("place", [0, 1])
def test_rings_of_noise_have_their_drop(place: int) -> None:
    figure, measured = drawn("frequency_noise"), pair()[place].measurements["frequency_noise"]
    area, curve = of_network(figure, place)
    np.testing.assert_array_equal(curve.x, measured.arrays["frequency"])
    np.testing.assert_array_equal(curve.y, measured.arrays["drop"])
    assert set(area.y[~np.isnan(area.y)]) == set(measured.arrays["drop_interval"].ravel())


def corrupted() -> list[ExamView]:
    """The two networks with an accuracy of its own in every cell: tiny ones take all images for one class."""
    found = []
    for place, one in enumerate(pair()):
        measured = one.measurements["corruptions"]
        cells = np.arange(75).reshape(15, 5) / 100 + 0.1 * place
        arrays = measured.arrays | {"accuracy": cells, "low": cells - 0.01, "high": cells + 0.02}
        scalars = measured.scalars | {"clean_accuracy": Scalar(value=0.9), "accuracy": Scalar(value=cells.mean())}
        found.append(changed(one, "corruptions", arrays=arrays, scalars=scalars))
    return found


def test_the_heat_map_has_a_row_a_corruption_on_a_shared_scale() -> None:
    figure = draw("corruptions", corrupted())[0]
    for trace, one in zip(figure.plot.data, corrupted(), strict=True):
        measured = one.measurements["corruptions"]
        np.testing.assert_array_equal(trace.z, measured.arrays["accuracy"])
        names = [key.removeprefix("accuracy_") for key in measured.scalars if key.startswith("accuracy_")]
        assert [name.replace("_", " ") for name in names] == list(trace.y)
        assert trace.coloraxis == "coloraxis"
        at = names.index("fog")
        row = next(row for row in figure.table.rows if row[:3] == (one.name, "fog", 4))
        assert row[3:] == tuple(measured.arrays[key][at, 3] for key in ("accuracy", "low", "high"))


def test_severity_nought_is_clean_and_the_mean_of_all_others_the_accuracy() -> None:
    figure = draw("corruptions", corrupted())[1]
    for place, one in enumerate(corrupted()):
        (curve,), scalars = of_network(figure, place), one.measurements["corruptions"].scalars
        assert list(curve.x) == [0, 1, 2, 3, 4, 5]
        assert curve.y[0] == scalars["clean_accuracy"].value
        assert np.mean(curve.y[1:]) == pytest.approx(scalars["accuracy"].value)


def test_the_samples_of_corruptions_are_pictures() -> None:
    measured = pair()[0].measurements["corruptions"]
    pictures = drawn("corruptions").pictures
    assert [picture.caption for picture in pictures][:2] == ["clean", "gaussian noise"]
    for picture, sample in zip(pictures, measured.arrays["samples"], strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture.png))), sample)
    kept = {name: array for name, array in measured.arrays.items() if name != "samples"}
    assert draw("corruptions", [changed(pair()[0], "corruptions", arrays=kept)])[0].pictures == []


@pytest.mark.parametrize("place", [0, 1])
def test_shape_bias_is_drawn_class_by_class(place: int) -> None:
    measured = pair()[place].measurements["shape_bias"]
    networks = list(pair())
    networks[place] = changed(
        pair()[place], "shape_bias", scalars=measured.scalars | {"shape_bias": Scalar(value=0.73)}
    )
    (figure,) = draw("shape_bias", networks)
    (points,) = of_network(figure, place)
    for name, value in zip(points.y, points.x, strict=True):
        scalar = measured.scalars.get(f"shape_bias_{name}")
        assert np.isnan(value) if scalar is None else value == scalar.value
    lines = [shape.x0 for shape in figure.plot.layout.shapes]
    assert 0.73 in lines


def test_cost_is_in_units_that_its_axes_name() -> None:
    figure = drawn("cost")
    scalars = pair()[1].measurements["cost"].scalars
    shown = [trace.x[0] for trace in of_network(figure, 1, "bar")]
    keys = {"parameters": 1e6, "flops": 1e9, "images_per_second": 1, "latency_seconds": 1e-3}
    assert shown == pytest.approx(
        [*(scalars[key].value / unit for key, unit in keys.items()), scalars["peak_memory_bytes"].value / 2**20]
    )
    axes = [getattr(figure.plot.layout, f"xaxis{row or ''}").title.text for row in ("", 2, 3, 4, 5)]
    assert [axis.split(",")[0] for axis in axes[:3]] == ["parameters", "GFLOPs per image", "images per second"]


@pytest.mark.parametrize("place", [0, 1])
def test_norms_are_those_of_the_units(place: int) -> None:
    figure, measured = drawn("norms"), pair()[place].measurements["norms"]
    weights, activations = (trace for trace in of_network(figure, place) if trace.mode == "lines+markers")
    np.testing.assert_array_equal(weights.y, [unit.values["weight_norm"].value for unit in measured.units])
    np.testing.assert_array_equal(activations.y, [unit.values["activation_norm"].value for unit in measured.units])


def test_a_long_training_is_thinned_to_means_within_their_lowest_and_highest() -> None:
    step = np.arange(1.0, 10_001)
    values = np.sin(step)
    values[123] = np.nan
    curve = thin(step, values)
    assert len(curve.step) == POINTS
    assert curve.step[-1] == step[-1]
    assert (curve.low <= curve.mean).all()
    assert (curve.mean <= curve.high).all()
    assert curve.low.min() == np.nanmin(values)
    few = thin(step[:5], values[:5])
    np.testing.assert_array_equal(few.mean, values[:5])


def test_training_curves_are_those_of_the_rows() -> None:
    rows = course(40)
    (figure,) = draw("training", [replace(pair()[0], training=course(200)), replace(pair()[1], training=rows)])
    loss = next(trace for trace in of_network(figure, 1) if trace.mode == "lines")
    np.testing.assert_array_equal(loss.y, [row["loss"] for row in rows])
    accuracy = next(t for t in of_network(figure, 0) if t.mode == "lines+markers" and "accuracy" in t.hovertemplate)
    np.testing.assert_array_equal(accuracy.y, [r["accuracy"] for r in course(200) if r["kind"] == "val"])
    titles = [figure.plot.layout[f"yaxis{row}"].title.text for row in ("", 2, 3, 4)]
    assert titles == ["loss", "accuracy on val", "gradient norm", "learning rate"]


def test_a_divergence_is_marked() -> None:
    assert divergence(course(50)) is None
    assert divergence(course(50, diverges=True)) == 51
    exploded = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 2.0), (2, 19.0), (3, 21.0))]
    assert divergence(exploded) == 3
    (figure,) = draw("training", [replace(pair()[0], training=course(50, diverges=True))])
    assert {shape.x0 for shape in figure.plot.layout.shapes} == {51}
    assert "diverged" in {annotation.text for annotation in figure.plot.layout.annotations}
    assert ("vit", "train", "divergence", 51.0, None, None, None) in list(figure.table.rows)


def test_each_class_has_a_curve_over_training_in_its_own_colour():
    ious = ({"road": 0.5, "<b>car</b>": None}, {"road": 0.75, "<b>car</b>": 0.25})
    rows = [{"kind": "train", "step": 1, "loss": 1.0}]
    rows += [{"kind": "val", "step": step, "miou": 0.5, "iou": iou} for step, iou in zip((10, 20), ious, strict=True)]
    boxes = [rows[0], {"kind": "val", "step": 10, "ap": 0.25, "class_ap": {"star": 0.25}}]
    views = [replace(pair()[0], training=rows), replace(pair()[1], training=boxes)]
    curves, classes = draw("training", views)
    assert [row[1:4] for row in classes.table.rows[:2]] == [("iou", 10.0, "road"), ("iou", 10.0, "<b>car</b>")]
    assert [row[-1] for row in classes.table.rows] == [0.5, None, 0.75, 0.25, 0.25]
    road, car, star = classes.plot.data
    assert (list(road.x), list(road.y)) == ([10.0, 20.0], [0.5, 0.75])
    assert (road.line.color, car.line.color) == tuple("rgb({},{},{})".format(*COLOURS[place]) for place in (0, 1))
    assert star.yaxis == "y2"
    assert "<b>" not in car.name
    titles = [axis.title.text for axis in curves.plot.select_yaxes()]
    assert {"mean IoU on val", "AP on val"} <= set(titles)
