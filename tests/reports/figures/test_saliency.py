"""Saliency: curves of maps and of shuffled ones, and the maps beside their images."""

import io

import numpy as np
from PIL import Image

from tests.reports.figures.probed import changed, pair, renamed
from vitclinic.reports.figures import draw


def test_curves_are_the_measured_ones():
    curves, _ = draw("saliency", list(pair()))
    for place, view in enumerate(pair()):
        arrays = view.measurements["saliency"].arrays
        for axis, curve in (("x", "insertion"), ("x2", "deletion")):
            traces = [t for t in curves.plot.data if t.legendgroup == str(place) and t.xaxis == axis]
            for trace, order, dash in zip(traces, ("", "shuffled_"), ("solid", "dot"), strict=True):
                np.testing.assert_array_equal(trace.y, arrays[f"{order}{curve}"])
                assert trace.line.dash == dash
                assert (trace.x[0], trace.x[-1]) == (0, 1)
    assert {row[:3] for row in curves.table.rows} == {
        (name, curve, order)
        for name in ("vit", "resnet")
        for curve in ("insertion", "deletion")
        for order in ("map", "shuffled")
    }


def test_the_legend_names_the_method_of_each_network():
    curves, _ = draw("saliency", list(pair()))
    shown = [trace.name for trace in curves.plot.data if trace.showlegend]
    assert shown == ["vit<br>gradient_attention", "vit<br>shuffled", "resnet<br>grad_cam", "resnet<br>shuffled"]


def test_each_image_is_shown_beside_the_maps_of_all_networks():
    _, maps = draw("saliency", list(pair()))
    assert len(maps.pictures) == 6
    width, height = Image.open(io.BytesIO(maps.pictures[0].png)).size
    assert width == 3 * height  # the image, and two maps
    assert maps.table.columns[-1] == "saliency"


def test_what_is_not_there_is_left_out():
    view = pair()[0]
    arrays = dict(view.measurements["saliency"].arrays)
    without = changed(view, "saliency", arrays={k: v for k, v in arrays.items() if k != "numbers"})
    assert [figure.name for figure in draw("saliency", [without])] == ["saliency-curves"]
    without = changed(view, "saliency", arrays={k: v for k, v in arrays.items() if k != "shuffled_deletion"})
    assert [figure.name for figure in draw("saliency", [without])] == ["saliency-maps"]


def test_what_a_user_named_is_text():
    for figure in draw("saliency", [renamed(pair()[0], "<script>")]):
        if figure.plot is not None:
            assert "<script" not in figure.plot.to_json().replace("\\u003c", "<")
