"""Attention over images: the image, then the map of every network that looked at it."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.reports.figures.layers import changed, exams, measurements
from vitclinic._core.images import beside, blend
from vitclinic.reports.figures import draw


def opened(picture):
    with Image.open(io.BytesIO(picture.png)) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def test_pictures_are_those_that_the_probe_draws():
    arrays = measurements("vit")["attention_maps"].arrays
    (figure,) = draw("attention_maps", exams("vit"))
    assert figure.plot is None
    assert len(figure.pictures) == len(arrays["numbers"]) == 8
    for picture, image, attention in zip(figure.pictures, arrays["images"], arrays["maps"], strict=True):
        assert np.array_equal(opened(picture), beside(image, attention))


def test_networks_that_looked_at_the_same_image_stand_side_by_side():
    arrays = [measurements(one)["attention_maps"].arrays for one in ("vit", "broadcasting")]
    (figure,) = draw("attention_maps", exams("vit", "resnet", "broadcasting"))
    assert len(figure.pictures) == 8
    expected = beside(arrays[0]["images"][3], arrays[0]["maps"][3], arrays[1]["maps"][3])
    assert np.array_equal(opened(figure.pictures[3]), expected)
    assert figure.pictures[3].caption == f"Image {arrays[0]['numbers'][3]}: vit; broadcasting"


def test_networks_with_other_images_have_pictures_of_their_own():
    arrays = dict(measurements("vit")["attention_maps"].arrays)
    arrays["images"] = arrays["images"][..., 0]
    (figure,) = draw("attention_maps", exams("vit") + changed("attention_maps", arrays=arrays))
    assert len(figure.pictures) == 16


def test_the_table_has_the_maps_on_their_grids():
    arrays = measurements("vit")["attention_maps"].arrays
    (figure,) = draw("attention_maps", exams("vit"))
    assert [row[-1] for row in figure.table.rows] == arrays["grid_maps"].ravel().tolist()
    assert figure.table.rows[16][:4] == ("vit", arrays["numbers"][1], 0, 0)


def photographs(height, width, count):
    pixels = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    maps = np.full((count, height, width), np.nan)
    arrays = {"images": pixels, "maps": maps, "grid_maps": np.ones((count, 2, 2)), "numbers": np.arange(count)}
    return changed("attention_maps", arrays=arrays)


@pytest.mark.parametrize(("height", "width"), [(500, 300), (300, 500)])
def test_large_images_are_reduced(height, width):
    (figure,) = draw("attention_maps", photographs(height, width, 1))
    shown = opened(figure.pictures[0])
    assert max(shown.shape[0], shown.shape[1] // 2) == 224
    assert shown.shape[1] / shown.shape[0] == pytest.approx(2 * width / height, rel=0.02)


def test_many_pictures_are_smaller_so_that_the_page_stays_small():
    (figure,) = draw("attention_maps", photographs(240, 240, 8) * 8)
    assert len(figure.pictures) == 8
    assert opened(figure.pictures[0]).shape == (129, 9 * 129, 3)
    assert sum(len(picture.png) for picture in figure.pictures) < 4e6


def test_single_heads_have_one_threshold_and_one_scale_for_all_networks():
    """A network whose heads see ten times as much is as light as that: colours can be compared."""
    image = np.full((1, 224, 224, 3), 100, np.uint8)
    flat, dense = (np.full((1, 2, 224, 224), value / 16) for value in (0.5, 1.0))
    flat[0, 0, :10] = 10 / 16
    arrays = {"images": image, "grid_maps": np.ones((1, 4, 4)), "numbers": np.arange(1), "heads": np.array([0, 3])}
    views = []
    for maps in (flat, dense):
        views += changed("attention_maps", arrays={**arrays, "head_maps": maps, "maps": maps[:, 0]})
    _, figure = draw("attention_maps", views)
    (picture,) = figure.pictures
    rows = opened(picture)
    assert rows.shape == (452, 672, 3)
    first, second = rows[:224], rows[228:]
    assert (first[100, 300] == 100).all()  # half of uniform attention: no colour
    assert (second[100, 300] != 100).any()
    assert np.array_equal(second[100, 300], blend(image[0], np.ones((224, 224)), (1.0, 10.0))[0, 0])
    assert np.array_equal(first[5, 300], blend(image[0], np.full((224, 224), 10.0), (1.0, 10.0))[0, 0])
    assert figure.table.rows[0][2:] == (0, 10.0, pytest.approx(10 / 224))
