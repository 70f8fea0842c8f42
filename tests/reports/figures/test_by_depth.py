"""Figures by depth: what is drawn is what was measured, shaded by the units that it is of."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest

from tests.reports.figures.layers import PROBES, changed, exams, measurements
from vitclinic._core.records import Scalar
from vitclinic.reports.figure import KINDS, Figure
from vitclinic.reports.figures import draw

NETWORK = {"cb_scale": "broadcasting"}
"""Which network has something to draw, if not the plain ViT."""
VALUES = [
    ("fourier", "fourier-depth", "delta_log_amplitude"),
    ("fourier", "fourier-change", "change"),
    ("variance", "variance-depth", "variance"),
    ("lesion", "lesion-drop", "accuracy_drop"),
    ("token_similarity", "token-similarity-depth", "absolute_cosine"),
    ("token_similarity", "token-similarity-depth", "cosine"),
    ("token_norms", "token-norms-outliers", "peak"),
    ("sparsity", "sparsity-depth", "active"),
    ("attention_entropy", "attention-entropy-layers", "ratio"),
    ("attention_entropy", "attention-entropy-class", "class_entropy"),
    ("attention_distance", "attention-distance-layers", "distance"),
    ("softmax_jacobian", "softmax-jacobian-layers", "ratio"),
    ("softmax_jacobian", "softmax-jacobian-layers", "frobenius"),
    ("cb_scale", "cb-scale-layers", "ratio"),
    ("cb_scale", "cb-scale-layers", "mean"),
]


def drawn(probe, networks) -> dict[str, Figure]:
    return {figure.name: figure for figure in draw(probe, networks)}


def points(figure, values):
    """The trace of points that has just these values."""
    known = [trace for trace in figure.plot.data if trace.type == "scatter" and trace.mode == "markers"]
    (found,) = [t for t in known if len(t.y) == len(values) and np.allclose(t.y, values, equal_nan=True)]
    return found


def column(figure, title):
    at = figure.table.columns.index(title)
    return [row[at] for row in figure.table.rows]


def spans(plot, kind):
    return [(shape.x0, shape.x1) for shape in plot.layout.shapes if shape.type == kind]


@pytest.mark.parametrize(("probe", "name", "value"), VALUES)
def test_points_and_table_are_the_measurement(probe, name, value):
    network = NETWORK.get(probe, "vit")
    figure = drawn(probe, exams(network))[name]
    units = [unit for unit in measurements(network)[probe].units if value in unit.values]
    found = points(figure, [unit.values[value].value for unit in units])
    assert [text.split(" ")[0] for text, _ in found.customdata] == [unit.name for unit in units]
    assert list(np.diff(found.x) > 0) == [True] * (len(units) - 1)
    told = [(row, of) for row, of in zip(figure.table.rows, column(figure, value), strict=True) if of is not None]
    assert [of for _, of in told] == [unit.values[value].value for unit in units]
    assert [row[:5] for row, _ in told] == [[network, unit.name, unit.kind, unit.stage, unit.depth] for unit in units]
    if units[0].values[value].low is not None:
        lows = [low for low in column(figure, f"{value} low") if low is not None]
        assert lows == [unit.values[value].low for unit in units]


@pytest.mark.parametrize("probe", PROBES)
def test_every_figure_says_how_to_read_it_and_leaves_theme_and_width_to_the_page(probe):
    figures = draw(probe, exams(NETWORK.get(probe, "vit"), "resnet"))
    assert figures
    for figure in figures:
        assert re.fullmatch("[a-z0-9-]+", figure.name)
        assert len(re.findall(r"[.](?= [A-Z]|$)", figure.reading)) == 2, figure.reading
        assert re.search(r"\([A-Z][^)]*\d\)$", figure.paper), figure.paper
        assert figure.table.rows
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
        if figure.plot is not None:
            layout = figure.plot.layout
            assert (layout.width, layout.font.color, layout.paper_bgcolor) == (None, None, None)
            assert layout.template.layout.paper_bgcolor == "rgba(0, 0, 0, 0)"
            assert all(annotation.font.color is None for annotation in layout.annotations)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("status", ["failed", "does_not_apply"])
def test_nothing_is_drawn_without_a_usable_measurement(probe, status):
    assert draw(probe, []) == []
    assert draw(probe, changed(probe, NETWORK.get(probe, "vit"), status=status, reason="it broke.")) == []


@pytest.mark.parametrize("probe", ["attention_entropy", "attention_distance", "attention_maps", "cb_scale"])
def test_networks_without_attention_are_left_out(probe):
    network = NETWORK.get(probe, "vit")
    assert draw(probe, exams("resnet", "mixer")) == []
    for figure in draw(probe, exams("resnet", network, "mixer")):
        assert {row[0] for row in figure.table.rows} == {network}


@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe != "attention_maps"])
@pytest.mark.parametrize("networks", [("vit",), ("vit", "resnet"), ("vit", "resnet", "mixer", "broadcasting") * 2])
def test_any_number_of_networks(probe, networks):
    names = tuple(f"network {number}" for number in range(len(networks)))
    for figure in draw(probe, exams(*networks, names=names)):
        measured = [n for n, one in zip(names, networks, strict=True) if measurements(one)[probe].status == "ok"]
        assert {row[0] for row in figure.table.rows} <= set(measured)
        shown = {trace.name for trace in figure.plot.data if trace.showlegend and trace.name in names}
        assert shown == {row[0] for row in figure.table.rows} or not shown  # matrices and curves have titles instead
        figure.plot.to_json()


def test_a_status_of_not_converged_is_drawn_and_said():
    (figure,) = draw("variance", changed("variance", status="not_converged", reason="too few images."))
    assert "vit (not converged)" in {trace.name for trace in figure.plot.data}


@pytest.mark.parametrize("probe", PROBES)
def test_what_users_named_is_a_text(probe):
    network = NETWORK.get(probe, "vit")
    measurement = measurements(network)[probe]
    units = [unit.model_copy(update={"name": f"<img src=x>.{unit.name}"}) for unit in measurement.units]
    odd, other = (changed(probe, network, units=units)[0] for _ in range(2))
    networks = [type(odd)("<script>alert(1)</script>", odd.measurements), type(other)("%{x}", other.measurements)]
    for figure in draw(probe, networks):
        assert figure.table.rows[0][0] == "<script>alert(1)</script>"
        if figure.plot is not None:
            text = figure.plot.to_json().replace("\\u003c", "<")
            assert "<img" not in text
            assert "<script" not in text
            assert "%{x}" not in re.sub('"hovertemplate":"[^"]*"', "", text)
            assert "&lt;script&gt;" in text


@pytest.mark.parametrize(("probe", "name", "value"), VALUES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_gaps(probe, name, value, odd):
    network = NETWORK.get(probe, "vit")
    units = [unit.model_copy(deep=True) for unit in measurements(network)[probe].units]
    at = max(number for number, unit in enumerate(units) if value in unit.values)
    units[at].values[value] = Scalar(value=odd, low=math.nan, high=odd)
    figure = drawn(probe, changed(probe, network, units=units))[name]
    values = [unit.values[value].value for unit in units if value in unit.values]
    assert math.isnan(points(figure, [*values[:-1], math.nan]).y[-1])
    assert not re.search("NaN|Infinity", figure.plot.to_json())
    assert str(column(figure, value)[-1]) == str(odd)


@pytest.mark.parametrize("probe", PROBES)
def test_what_an_old_measurement_lacks_is_left_out(probe):
    network = NETWORK.get(probe, "vit")
    units = measurements(network)[probe].units
    bare = [unit.model_copy(update={"values": {}}) for unit in units]
    for changes in ({"arrays": {}}, {"units": bare}, {"units": []}, {"arrays": {}, "units": bare}):
        for figure in draw(probe, changed(probe, network, **changes)):
            assert figure.table.rows
    assert draw(probe, changed(probe, network, arrays={}, units=bare)) == []


def test_between_two_states_is_the_shade_of_the_unit_that_leads_from_one_to_the_other():
    units = measurements("vit")["fourier"].units
    plot = drawn("fourier", exams("vit"))["fourier-depth"].plot
    shaded = [unit for unit in units if unit.kind in ("msa", "mlp")]
    assert len(shaded) == 6
    assert spans(plot, "rect") == [(unit.depth - 1, unit.depth) for unit in shaded]
    assert [shape.fillcolor for shape in plot.layout.shapes] == [KINDS[unit.kind] for unit in shaded]
    bars = drawn("fourier", exams("vit"))["fourier-change"].plot
    assert spans(bars, "rect") == [(unit.depth - 0.5, unit.depth + 0.5) for unit in shaded]


def test_lines_part_stages():
    def borders(probe):
        units = measurements("resnet")[probe].units
        return [later.depth for one, later in pairwise(units) if one.stage != later.stage]

    assert (len(borders("lesion")), len(borders("variance"))) == (3, 1)
    bars = drawn("lesion", exams("resnet"))["lesion-drop"].plot
    assert spans(bars, "line") == [(depth - 0.5, depth - 0.5) for depth in borders("lesion")]
    lines = drawn("variance", exams("resnet"))["variance-depth"].plot
    assert spans(lines, "line") == [(depth - 1, depth - 1) for depth in borders("variance")]


def test_networks_with_the_same_units_share_a_panel_others_have_their_own():
    plot = drawn("variance", exams("vit", "resnet", "vit", names=("a", "b", "c")))["variance-depth"].plot
    assert [annotation.text for annotation in plot.layout.annotations] == ["a, c", "b"]
    axes = {trace.name: trace.yaxis for trace in plot.data if trace.name in ("a", "b", "c")}
    assert axes == {"a": "y", "b": "y2", "c": "y"}


def test_bars_of_networks_in_one_panel_stand_beside_each_other():
    plot = drawn("lesion", exams("vit", "vit", names=("a", "b")))["lesion-drop"].plot
    first, second = (trace for trace in plot.data if trace.type == "bar")
    values = [unit.values["accuracy_drop"].value for unit in measurements("vit")["lesion"].units]
    assert np.array_equal(first.y, values)
    assert (np.asarray(second.x) - first.x >= first.width).all()
    assert (np.asarray(second.x) - first.x < 0.5).all()


def test_whiskers_are_the_interval():
    units = measurements("vit")["lesion"].units
    plot = drawn("lesion", exams("vit"))["lesion-drop"].plot
    (found,) = [trace for trace in plot.data if trace.type == "scatter" and trace.error_y.array is not None]
    np.testing.assert_allclose(found.y + found.error_y.array, [u.values["accuracy_drop"].high for u in units])
    np.testing.assert_allclose(found.y - found.error_y.arrayminus, [u.values["accuracy_drop"].low for u in units])


def test_units_are_numbered_where_all_networks_have_the_same_and_lie_by_share_of_depth_elsewhere():
    values = [unit.values["ratio"].value for unit in measurements("vit")["attention_entropy"].units]
    alone, mixed = (
        drawn("attention_entropy", exams(*networks))["attention-entropy-layers"]
        for networks in (("vit",), ("vit", "broadcasting"))
    )
    assert list(points(alone, values).x) == [1, 2, 3]
    assert list(points(mixed, values).x) == [0, 0.5, 1]
    assert (alone.plot.layout.xaxis.title.text, "depth" in mixed.plot.layout.xaxis.title.text) == (
        "attention layer",
        True,
    )


@pytest.mark.parametrize(
    ("probe", "array", "divisor"),
    [("attention_entropy", "head_entropy", "maximum"), ("attention_distance", "head_distance", None)],
)
def test_heads_are_drawn_around_the_mean_of_their_layer(probe, array, divisor):
    measurement = measurements("vit")[probe]
    figure = next(iter(drawn(probe, exams("vit")).values()))
    heads = measurement.arrays[array]
    by = [1 if divisor is None else unit.values[divisor].value for unit in measurement.units]
    found = points(figure, (heads / np.array(by)[:, None]).ravel())
    assert [head for _, head in found.customdata] == [0, 1] * 3
    for head in range(2):
        assert column(figure, f"{array.removeprefix('head_')} of head {head}") == list(heads[:, head])


def test_layers_of_different_numbers_of_heads():
    heads = measurements("vit")["attention_entropy"].arrays["head_entropy"].copy()
    heads[1, 1] = math.nan
    networks = changed("attention_entropy", arrays={"head_entropy": heads})
    figure = drawn("attention_entropy", networks)["attention-entropy-layers"]
    assert column(figure, "entropy of head 1") == [heads[0, 1], None, heads[2, 1]]


def test_curves_are_those_of_the_units_and_end_where_their_grid_does():
    measurement = measurements("resnet")["fourier"]
    figure = drawn("fourier", exams("resnet"))["fourier-curves"]
    lines = [trace for trace in figure.plot.data if trace.mode == "lines"]
    stored = measurement.arrays["delta_log_amplitude"]
    assert len(lines) == len(stored) == len(measurement.units)
    for trace, row in zip(lines, stored, strict=True):
        assert np.array_equal(trace.y, row[~np.isnan(row)])
        assert trace.x[-1] == 1
    assert len({trace.line.color for trace in lines}) == len(lines)
    assert column(figure, "delta_log_amplitude") == list(stored[~np.isnan(stored)])


def test_a_variance_that_has_collapsed_is_seen_and_one_of_many_orders_is_on_a_log_axis():
    def axis(last):
        units = [unit.model_copy(deep=True) for unit in measurements("vit")["variance"].units]
        units[-1].values["variance"] = Scalar(value=last)
        return drawn("variance", changed("variance", units=units))["variance-depth"].plot.layout.yaxis.type

    assert (axis(0.0), axis(1e6)) == ("linear", "log")
