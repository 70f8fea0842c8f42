"""The matrix of CKA: a panel a network, the kinds of its units along the axes, lines between its stages."""

import numpy as np

from tests.reports.figures.layers import changed, exams, measurements
from vitclinic.reports.figure import KIND_MARKS
from vitclinic.reports.figures import draw


def matrices(figure):
    return [trace for trace in figure.plot.data if trace.type == "heatmap"]


def test_a_panel_a_network_with_its_matrix_and_all_of_it_in_the_table():
    (figure,) = draw("cka", exams("vit", "resnet", "mixer"))
    stored = [measurements(one)["cka"].arrays["cka"] for one in ("vit", "resnet", "mixer")]
    for trace, matrix in zip(matrices(figure), stored, strict=True):
        assert np.array_equal(trace.z, matrix)
    assert [annotation.text for annotation in figure.plot.layout.annotations] == ["vit", "resnet", "mixer"]
    assert [row[-1] for row in figure.table.rows] == [value for matrix in stored for value in matrix.ravel()]


def test_the_kinds_of_units_are_at_both_axes_and_stages_are_parted():
    units = measurements("resnet")["cka"].units
    (figure,) = draw("cka", exams("resnet"))
    strips = [shape for shape in figure.plot.layout.shapes if shape.type == "rect"]
    below = [shape.fillcolor for shape in strips if shape.y1 < 0]
    beside = [shape.fillcolor for shape in strips if shape.x1 < 0]
    assert below == beside == [KIND_MARKS[unit.kind] for unit in units]
    borders = [shape.x0 for shape in figure.plot.layout.shapes if shape.type == "line" and shape.x0 == shape.x1]
    first = [number for number, unit in enumerate(units) if number and unit.stage != units[number - 1].stage]
    assert borders == [number - 0.5 for number in first]
    assert len(first) == 3


def test_units_of_one_name_are_not_taken_for_one():
    units = [unit.model_copy(update={"name": "same"}) for unit in measurements("vit")["cka"].units]
    (figure,) = draw("cka", changed("cka", units=units))
    (trace,) = matrices(figure)
    assert len(set(trace.x)) == len(units)


def test_the_scale_holds_negative_values_and_gaps():
    matrix = measurements("vit")["cka"].arrays["cka"].copy()
    matrix[0, 1] = -0.2
    matrix[1, 2] = np.nan
    (figure,) = draw("cka", changed("cka", arrays={"cka": matrix}))
    assert (figure.plot.layout.coloraxis.cmin, figure.plot.layout.coloraxis.cmax) == (-0.2, 1)
    assert "NaN" not in figure.plot.to_json()


def test_a_matrix_that_does_not_belong_to_the_units_is_not_drawn():
    assert draw("cka", changed("cka", arrays={"cka": np.eye(3)})) == []
