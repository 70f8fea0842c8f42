"""Errors as images: what the matrix and the lists show, and how much of it."""

import base64
import gzip
import json
import re

import numpy as np
import pytest

from tests.reports.made import measurement
from tests.reports.made_errors import LONG, NASTY, errors
from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView
from vitclinic.reports.figures import draw
from vitclinic.reports.figures.errors import MOST_CLASSES, MOST_CONFUSED
from vitclinic.reports.figures.label_errors import write_suspects
from vitclinic.reports.figures.worst_images import short_name
from vitclinic.reports.page import LIMIT, render


def view(seed=0, name="runs/plain", **options):
    made = errors(np.random.default_rng(seed), **options)
    return ExamView(name, {probe: measurement(probe, seed, **parts) for probe, parts in made.items()})


def test_the_matrix_of_a_few_classes_is_whole():
    one = view(classes=("a", "b", "c", "d"))
    matrix = draw("errors", [one])[1].album.matrix
    arrays = one.measurements["errors"].arrays
    shown = {(row, column): cell.text for row, cells in enumerate(matrix.cells) for column, cell in enumerate(cells)}
    expected = {
        tuple(pair): str(count) for pair, count in zip(arrays["pairs"].tolist(), arrays["pair_images"], strict=True)
    }
    assert {place: text for place, text in shown.items() if text} == expected
    assert matrix.names == ["a", "b", "c", "d"]


def test_every_confused_cell_opens_images_of_exactly_that_confusion():
    one = view(classes=("a", "b", "c", "d"), shown=400)
    album = draw("errors", [one])[1].album
    opened = 0
    for row, cells in enumerate(album.matrix.cells):
        for column, cell in enumerate(cells):
            if row != column and cell.text:
                listing, place = cell.opens
                said = {str(album.thumbnails[number].said) for number in album.lists[listing].rows[place].thumbnails}
                what = f"<bdi>{'abcd'[row]}</bdi> taken for <bdi>{'abcd'[column]}</bdi>"
                assert said
                assert all(text.startswith(what) for text in said)
                opened += 1
            else:
                assert cell.opens is None
    assert opened > 3


@pytest.mark.parametrize("count", [2, MOST_CLASSES, MOST_CLASSES + 1, 1000])
def test_any_number_of_classes(count):
    one = view(classes=tuple(f"class {number}" for number in range(count)), images=3000)
    by_class, confusions = draw("errors", [one])
    assert len(confusions.album.matrix.names) <= max(MOST_CLASSES, MOST_CONFUSED + 1)
    assert len(by_class.table.rows) == count
    assert len(by_class.plot.data[0].x) <= 30
    assert sum(row[2] for row in confusions.table.rows) == 3000
    assert len(render([one]).encode()) < LIMIT / 2


def test_twenty_networks_with_photographs_stay_below_the_limit():
    exams = [view(seed, f"runs/{seed}", classes=NASTY, shown=160, side=72) for seed in range(20)]
    page = render(exams)
    assert len(page.encode()) < LIMIT
    assert "<script>alert" not in page.replace("<script>{{", "")


def test_images_are_in_the_page_once_and_can_be_left_out():
    page = render([view()])
    packed = re.findall(r'id="packed-album-[^"]*">([^<]*)<', page)
    images = [image for text in packed for image in json.loads(gzip.decompress(base64.b64decode(text)))]
    assert all(re.match(r"data:image/(png|jpeg);base64,", image) for image in images)
    assert len(images) > 20
    bare = render([view()], images=False)
    assert "packed-album" not in bare
    assert "data-picture=" not in bare.split("<main")[1]
    assert "pictures left out" in bare


def test_a_network_without_errors_says_so():
    made = view(wrong=0.0)
    album = draw("errors", [made])[1]
    assert album.notes == ["Every image was recognized."]
    assert album.album.lists == []
    assert "No label is suspected." in draw("label_errors", [made])[0].notes
    render([made])


def test_names_of_slices_leave_a_phone_room_for_the_plot():
    features = {"images of the class": "highest quarter (146 to 150)", "brightness": "lowest quarter (0.17 to 0.268)"}
    one = measurement("slices", 0, **errors(np.random.default_rng(0))["slices"])
    count = len(one.arrays["slice_feature"])
    named = {
        "slice_feature": np.array([list(features)[place % 2] for place in range(count)]),
        "slice_value": np.array([list(features.values())[place % 2] for place in range(count)]),
    }
    plot = draw("slices", [ExamView("runs/a", {"slices": one.model_copy(update={"arrays": one.arrays | named})})])[0]
    ticks = list(plot.plot.data[0].y)
    assert "brightness: lowest quarter" in ticks
    assert max(map(len, ticks)) <= 34


def test_too_few_images_for_slices_are_told():
    one = measurement("slices", 0, **errors(np.random.default_rng(0))["slices"])
    empty = {name: array[:0] if name.startswith(("slice_", "rest_")) else array for name, array in one.arrays.items()}
    (figure,) = draw("slices", [ExamView("runs/a", {"slices": one.model_copy(update={"arrays": empty})})])
    assert figure.title == "No slices"
    assert "too few images" in figure.reading


def test_a_network_that_suspects_a_third_of_the_labels_is_doubted():
    parts = errors(np.random.default_rng(0))["label_errors"]
    doubts = []
    for share in (0.05, 0.33):
        scalars = {**parts["scalars"], "wrong_labels": Scalar(value=share)}
        one = measurement("label_errors", 0, scalars=scalars, arrays=parts["arrays"])
        notes = draw("label_errors", [ExamView("runs/a", {"label_errors": one})])[0].notes
        doubts.append([note for note in notes if "has not learned enough" in note])
    assert doubts[0] == []
    assert doubts[1][0].startswith("By this count 33% of the labels would be wrong.")


def test_suspects_are_a_file_beside_the_page(tmp_path):
    one = view(classes=("=a", "b"))
    file = write_suspects(tmp_path / "report.html", [one])
    assert file == tmp_path / "report-labels.csv"
    head, first, *_ = file.read_text().split("\n")
    assert head.strip() == "network,path,given_label,suggested_label,score"
    assert "/home/me/" in first
    assert "'=a" in file.read_text()  # no formula for a spreadsheet
    shown = draw("label_errors", [one])[0].table.rows
    assert not any("/home" in str(cell) for row in shown for cell in row)
    assert write_suspects(tmp_path / "none.html", [view(wrong=0.0)]) is None


def test_the_page_has_no_folder_of_this_machine():
    page = render([view(folder="/home/me/my photos")])
    assert "/home/me" not in page


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/me/my photos/cat/1.png", "1.png"),
        ("photos/cat/1.png", "1.png"),
        ("/data/x.parquet row 3 (a/b.png)", "x.parquet row 3 (a/b.png)"),
        ("digits image 7", "digits image 7"),
        ("C:\\me\\photos\\1.png", "1.png"),
        (LONG, LONG),
    ],
)
def test_short_names(name, shown):
    assert short_name(name) == shown
