"""Maps of embeddings: which points have which image, class and error, and what the page carries of them."""

import base64
import gzip
import json

import numpy as np

from tests.reports.made import measurement
from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView
from vitclinic.reports.figures import draw
from vitclinic.reports.figures.embedding_map import MOST_COLOURED, MOST_IMAGES
from vitclinic.reports.page import render


def view(seed=0, name="runs/a", images=40, classes=("a", "b", "c"), by_scores=True, labelled=True):
    random = np.random.default_rng(0)  # the images and labels are the same for all seeds
    pixels = random.integers(0, 256, (images, 6, 6, 3), dtype=np.uint8)
    labels = random.integers(0, len(classes), images)
    said = np.where(np.random.default_rng(seed).random(images) < 0.3, (labels + 1) % len(classes), labels)
    arrays = {
        "points": np.random.default_rng(seed).normal(size=(images, 2)).astype(np.float32),
        "shown_images": pixels,
        "shown_names": np.array([f"/home/me/{number}.png" for number in range(images)]),
    }
    if labelled:
        arrays |= {"labels": labels, "predicted": said, "by_scores": np.array(by_scores), "classes": np.array(classes)}
    scalars = {"variance_shown": Scalar(value=0.4)}
    return ExamView(name, {"embedding_map": measurement("embedding_map", seed, scalars=scalars, arrays=arrays)})


def traces(figure, **wanted):
    return [trace for trace in figure.plot.data if all(getattr(trace, key) == value for key, value in wanted.items())]


def test_each_point_has_its_own_image_class_and_error():
    one = view()
    arrays = one.measurements["embedding_map"].arrays
    (figure,) = draw("embedding_map", [one])
    for number, name in enumerate("abc"):
        (trace,) = traces(figure, name=name)
        mine = np.flatnonzero(arrays["labels"] == number)
        np.testing.assert_allclose(np.stack([trace.x, trace.y], 1), arrays["points"][mine])
        names = [figure.album.thumbnails[image].name for image in trace.customdata]
        assert names == [f"{place}.png" for place in mine]
    (wrong,) = traces(figure, name="wrong")
    missed = np.flatnonzero(arrays["labels"] != arrays["predicted"])
    assert [figure.album.thumbnails[image].name for image in wrong.customdata] == [f"{place}.png" for place in missed]
    assert all("taken for" in text for text in wrong.text)
    assert "40% of the variance" in " ".join(figure.notes)


def test_an_image_on_which_networks_agree_is_in_the_page_once():
    same = [view(name="runs/a"), view(name="runs/b")]
    (figure,) = draw("embedding_map", same)
    assert len(figure.album.thumbnails) == 40
    assert len({row[0] for row in figure.table.rows}) == len(figure.album.lists) == 2


def test_many_images_and_classes_are_cut_and_told():
    many = view(images=MOST_IMAGES + 200, classes=tuple(f"class {number}" for number in range(MOST_COLOURED + 5)))
    (figure,) = draw("embedding_map", [many])
    assert len(figure.album.thumbnails) == MOST_IMAGES
    assert "Not all points" in " ".join(figure.notes)
    shown = traces(figure, xaxis="x")
    assert len(shown) == MOST_COLOURED + 1
    assert sum(len(trace.x) for trace in shown) == len(figure.table.rows) == MOST_IMAGES + 200
    styles = {(trace.marker.color, trace.marker.symbol) for trace in shown}
    assert len(styles) == MOST_COLOURED + 1


def test_without_labels_it_is_one_map_and_a_vote_is_told():
    (figure,) = draw("embedding_map", [view(labelled=False)])
    assert len(figure.plot.data) == 1
    assert not figure.album.lists
    (figure,) = draw("embedding_map", [view(by_scores=False)])
    assert "vote of the nearest" in " ".join(figure.notes)


def test_the_page_has_the_images_that_points_name_unless_nobody_wants_them():
    page = render([view()])
    packed = page.partition('id="packed-album-embedding-map"')[2].partition(">")[2].partition("<")[0]
    addresses = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert len(addresses) == 40
    assert all(address.startswith("data:image/") for address in addresses)
    assert "data-peeks" in page
    bare = render([view()], images=False)
    assert "packed-album-embedding-map" not in bare
    assert " data-peeks" not in bare.partition("<main")[2].partition("</main>")[0]
    assert "/home/me" not in page
