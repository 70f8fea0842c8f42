"""Figures of curvature show the measured numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import vitclinic.reports.figures  # noqa: F401
from tests.reports.figures.probed import changed, pair, renamed
from vitclinic.reports.figure import Figure
from vitclinic.reports.figures import draw
from vitclinic.reports.figures.canvas import band
from vitclinic.reports.figures.sharpness import smooth_density


def drawn(probe: str, name: str | None = None) -> Figure:
    figures = {figure.name: figure for figure in draw(probe, pair())}
    return figures[name or next(iter(figures))]


def of_network(figure: Figure, place: int, kind: str | None = None) -> list:
    """The traces of a network, in their order."""
    return [t for t in figure.plot.data if t.legendgroup == str(place) and (kind is None or t.type == kind)]


@pytest.mark.parametrize("place", [0, 1])
def test_the_spectrum_has_nep_left_of_zero_and_the_rest_right(place: int) -> None:
    figure, measured = drawn("hessian_spectrum"), pair()[place].measurements["hessian_spectrum"]
    values, steps = measured.arrays["eigenvalues"], of_network(figure, place)
    mass = {bool(np.mean(trace.x) < 0): np.sum(trace.y[1:-1:2]) for trace in steps}
    assert mass.get(True, 0.0) == pytest.approx(measured.scalars["nep"].value)
    assert mass.get(False, 0.0) == pytest.approx(1 - measured.scalars["nep"].value)
    assert "NEP" in steps[0].name
    rows = [row for row in figure.table.rows if row[0] == pair()[place].name]
    np.testing.assert_array_equal([row[3] for row in rows], values.ravel())


def test_a_spectrum_without_negative_eigenvalues_has_one_panel() -> None:
    arrays = {"eigenvalues": np.array([[3.0, 2.0], [5.0, 1.0]])}
    (figure,) = draw("hessian_spectrum", [changed(pair()[0], "hessian_spectrum", arrays=arrays)])
    assert [title.text for title in figure.plot.layout.annotations] == ["above zero"]
    assert np.sum(figure.plot.data[0].y[1:-1:2]) == pytest.approx(1.0)


@pytest.mark.parametrize("place", [0, 1])
def test_sharpness_is_drawn_by_component_and_by_block(place: int) -> None:
    measured = pair()[place].measurements["sharpness"]
    figure = drawn("sharpness", "sharpness-components")
    trace = of_network(figure, place)[0]
    shown = dict(zip(trace.y, trace.x, strict=True))
    assert shown["whole network"] == measured.scalars["lambda_max"].value
    assert shown["embedding"] == measured.scalars["lambda_max_embedding"].value
    blocks = of_network(drawn("sharpness", "sharpness-blocks"), place)[0]
    np.testing.assert_array_equal(blocks.y, [unit.values["lambda_max"].value for unit in measured.units])
    np.testing.assert_array_equal(blocks.x, np.arange(1, len(measured.units) + 1))
    trace = of_network(drawn("sharpness", "sharpness-trace"), place)[0]
    scalar = measured.scalars["trace"]
    assert trace.x[0] == scalar.value
    error = trace.error_x
    assert (trace.x[0] - error.arrayminus[0], trace.x[0] + error.array[0]) == pytest.approx((scalar.low, scalar.high))


def test_the_density_is_one_in_all_and_has_the_mean_of_its_nodes() -> None:
    nodes, weights = np.array([-1.0, 0.0, 5.0]), np.array([0.1, 0.8, 0.1])
    x = np.linspace(-2, 6, 8001)
    density = smooth_density(x, nodes, weights, 0.05)
    assert np.trapezoid(density, x) == pytest.approx(1.0, abs=1e-6)
    assert np.trapezoid(density * x, x) == pytest.approx(nodes @ weights, abs=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_each_draw_of_the_flatness_is_a_point_and_the_loss_a_diamond(place: int) -> None:
    figure, measured = drawn("flatness"), pair()[place].measurements["flatness"]
    (box,), (alone,) = of_network(figure, place, "box"), of_network(figure, place, "scatter")
    np.testing.assert_array_equal(box.y, measured.arrays["losses"])
    assert list(alone.y) == [measured.scalars["loss"].value]
    assert set(measured.arrays["losses"].tolist()) <= {row[2] for row in figure.table.rows}


def test_a_contour_map_has_x_to_the_right_and_y_upwards() -> None:
    figure, measured = drawn("landscape", "landscape-contours"), pair()[0].measurements["landscape"]
    losses = measured.arrays["losses"]
    contour = figure.plot.data[0]
    assert contour.type == "contour"
    np.testing.assert_array_equal(contour.customdata, losses.T)  # plotly: z[row of y][column of x]
    rows = {(x, y): loss for name, x, y, loss in figure.table.rows if name == "vit"}
    x, y = measured.arrays["x"], measured.arrays["y"]
    assert rows[(x[0], y[-1])] == losses[0, -1] != losses[-1, 0]


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_maps_and_surfaces_share_one_scale_which_is_logarithmic_where_losses_are_far_apart(factor: float) -> None:
    measured = pair()[1].measurements["landscape"]
    arrays = measured.arrays | {"losses": measured.arrays["losses"] * factor}
    networks = [pair()[0], changed(pair()[1], "landscape", arrays=arrays)]
    everything = np.concatenate([one.measurements["landscape"].arrays["losses"].ravel() for one in networks])
    _, contours, surfaces = draw("landscape", networks)
    log = factor > 1
    ends = [np.log10(end) if log else end for end in (everything.min(), everything.max())]
    for figure in (contours, surfaces):
        colours = figure.plot.layout.coloraxis
        assert [colours.cmin, colours.cmax] == pytest.approx(ends)
        assert all(trace.coloraxis == "coloraxis" for trace in figure.plot.data if trace.type != "scatter")
    np.testing.assert_array_equal(surfaces.plot.data[1].z, arrays["losses"].T)
    for scene in (surfaces.plot.layout.scene, surfaces.plot.layout.scene2):
        assert scene.zaxis.type == ("log" if log else "linear")
        assert list(scene.zaxis.range) == pytest.approx(ends)
    assert surfaces.heavy
    assert not contours.heavy


def test_points_that_were_not_evaluated_are_gaps() -> None:
    measured = pair()[0].measurements["landscape"]
    evaluated = np.zeros((5, 5), bool)
    evaluated[1:4, 1:4] = True
    sections, contours, _ = draw(
        "landscape", [changed(pair()[0], "landscape", arrays=measured.arrays | {"evaluated": evaluated})]
    )
    assert np.isnan(contours.plot.data[0].z).sum() == 16
    assert np.isnan(sections.plot.data[0].y).tolist() == [True, False, False, False, True]


def test_sections_go_through_the_network() -> None:
    figure, measured = drawn("landscape", "landscape-sections"), pair()[0].measurements["landscape"]
    along_x, along_y = of_network(figure, 0)
    np.testing.assert_array_equal(along_x.y, measured.arrays["losses"][:, 2])
    np.testing.assert_array_equal(along_y.y, measured.arrays["losses"][2])
    assert along_x.y[2] == along_y.y[2] == measured.scalars["loss"].value


def test_a_line_is_drawn_beside_planes_and_alone() -> None:
    measured = pair()[0].measurements["landscape"]
    arrays = {"x": measured.arrays["x"], "losses": measured.arrays["losses"][:, 2]}
    line = changed(pair()[0], "landscape", arrays=arrays)
    (alone,) = draw("landscape", [line])
    np.testing.assert_array_equal(alone.plot.data[0].y, arrays["losses"])
    assert len(draw("landscape", [line, pair()[1]])) == 3


def test_the_path_of_the_training_is_drawn_on_its_plane() -> None:
    path = np.array([[1.0, 0.5], [0.2, 0.1], [0.0, 0.0]])
    arrays = pair()[0].measurements["landscape"].arrays | {"path": path, "path_epoch": np.array([0.0, 1.0, 2.0])}
    _, contours, _ = draw("landscape", [changed(pair()[0], "landscape", arrays=arrays)])
    walked = contours.plot.data[1]
    np.testing.assert_array_equal(np.stack([walked.x, walked.y], 1), path)


@pytest.mark.parametrize("place", [0, 1])
def test_a_trajectory_ends_in_the_middle(place: int) -> None:
    figure, measured = drawn("trajectory"), pair()[place].measurements["trajectory"]
    (trace,) = of_network(figure, place)
    np.testing.assert_array_equal(trace.r, [*measured.arrays["radius"], 0])
    np.testing.assert_allclose(np.radians(trace.theta[:-1]), measured.arrays["angle"])


@pytest.mark.parametrize("place", [0, 1])
def test_the_kernels_spectrum_ends_at_one_over_its_condition_number(place: int) -> None:
    measured = pair()[place].measurements["ntk"]
    spectrum = next(t for t in of_network(drawn("ntk", "ntk-spectrum"), place) if t.showlegend)
    assert spectrum.y[0] == pytest.approx(1)
    kappas = measured.arrays["condition_number"]
    assert 1 / spectrum.y[-1] == pytest.approx(np.exp(np.log(kappas).mean()), rel=1e-6)
    condition = of_network(drawn("ntk", "ntk-condition"), place)[0]
    assert condition.x[0] == measured.scalars["condition_number"].value


def test_networks_of_one_name_are_two_networks() -> None:
    (figure,) = draw("flatness", [renamed(one, "same") for one in pair()])
    first, second = (of_network(figure, place, "box")[0] for place in (0, 1))
    assert first.x[0] != second.x[0]


def test_a_band_has_gaps_where_its_ends_are_not_known() -> None:
    area = band(0, [0, 1, 2, 3, 4], [0, 0, np.nan, 0, 0], [1, 1, 1, 2, np.inf])
    np.testing.assert_array_equal(area.x, [0, 1, 1, 0, np.nan, 3, 3])
    np.testing.assert_array_equal(area.y, [1, 1, 0, 0, np.nan, 2, 0])


def test_the_bound_of_an_open_interval_is_called_one() -> None:
    measured = pair()[0].measurements["ntk"]
    kappa = measured.scalars["condition_number"].model_copy(update={"low": 123.0, "high": np.inf})
    scalars = measured.scalars | {"condition_number": kappa}
    _, spectrum = draw("ntk", [changed(replace(pair()[0], name="n"), "ntk", scalars=scalars)])
    assert spectrum.plot.data[1].name.endswith("κ at least 123")
