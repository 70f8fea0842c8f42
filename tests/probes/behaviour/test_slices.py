"""Slices: a planted weakness is found, chance is not, and the test is Fisher's."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.stats import fisher_exact
from torch import nn

from tests.probes.subjects import subject
from vitclinic.data import Batch, open_data
from vitclinic.data.split import read_columns, read_sizes
from vitclinic.probes import DoesNotApply, Slices, load_subject, measure
from vitclinic.probes.behaviour.slices import ImageStatistics, Slice, compare_slices, divide_columns, divide_numbers


def random_slices(random, n):
    """Slices as an exam has them: quarters of four numbers, and the values of a column."""
    numbers = {name: random.normal(size=n) for name in ("brightness", "contrast", "size", "aspect")}
    numbers["images of the class"] = random.integers(0, 3, n).astype(float)
    column = random.choice(["front", "back", "left"], n, p=[0.6, 0.3, 0.1])
    return [*divide_numbers(numbers), *divide_columns({"camera": column})]


def test_p_is_that_of_fishers_exact_test():
    random = np.random.default_rng(0)
    correct = random.random(300) < 0.7
    for test in compare_slices(random_slices(random, 300), correct):
        table = [
            [test.correct, test.images - test.correct],
            [test.rest_correct, test.rest_images - test.rest_correct],
        ]
        assert test.p == pytest.approx(fisher_exact(table, alternative="less").pvalue, rel=1e-9)
        assert test.images + test.rest_images == 300
        assert test.p <= test.adjusted <= 1


def test_a_planted_slice_is_found_and_comes_first():
    random = np.random.default_rng(1)
    named = first = 0
    for _ in range(50):
        slices = random_slices(random, 600)
        bad = next(part for part in slices if part.value == "left")
        correct = random.random(600) < np.where(bad.inside, 0.55, 0.85)
        tests = compare_slices(slices, correct)
        named += next(test for test in tests if test.part is bad).adjusted < 0.05
        first += min(tests, key=lambda test: test.p).part is bad
    assert first == 50
    assert named >= 45


def test_on_null_data_at_most_5_percent_of_exams_name_any():
    random = np.random.default_rng(2)
    exams = 600
    named = 0
    for _ in range(exams):
        correct = random.random(400) < random.uniform(0.5, 0.95)
        named += any(test.adjusted < 0.05 for test in compare_slices(random_slices(random, 400), correct))
    assert named <= 0.05 * exams


def test_slices_that_are_too_small_are_left_out():
    inside = np.arange(100) < 10
    assert compare_slices([Slice("a", "b", inside)], np.ones(100, bool), least=20) == []
    assert compare_slices([Slice("a", "b", ~inside)], np.ones(100, bool), least=20) == []
    assert len(compare_slices([Slice("a", "b", inside)], np.ones(100, bool), least=10)) == 1


def test_no_slice_to_compare_is_no_good_news():
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    with pytest.raises(DoesNotApply, match=r"too few images .*\(30\).* at least 20"):
        Slices()(network, [(torch.rand(30, 3, 8, 8), torch.arange(30) % 2)])


def test_quarters_are_quarters_and_equal_numbers_stay_together():
    parts = divide_numbers({"x": np.random.default_rng(0).normal(size=400)})
    assert [int(part.inside.sum()) for part in parts] == [100] * 4
    tied = divide_numbers({"x": np.r_[np.zeros(300), np.ones(100)]})
    assert [int(part.inside.sum()) for part in tied] == [300, 100]
    assert divide_numbers({"x": np.ones(50)}) == []


def test_columns_of_texts_of_few_and_of_many_numbers():
    random = np.random.default_rng(0)
    columns = {
        "camera": random.choice(["a", "b"], 90),
        "year": random.choice(["2019", "2020"], 90),
        "length": np.array([f"{value:.3f}" for value in random.random(90)]),
        "same": np.full(90, "x"),
    }
    parts = divide_columns(columns)
    counts = {name: sum(part.feature == name for part in parts) for name in columns}
    assert counts == {"camera": 2, "year": 2, "length": 4, "same": 0}


def test_brightness_and_contrast_are_those_of_grey_pixels():
    images = torch.rand(7, 3, 5, 6)
    numbers = torch.tensor([4, 5, 6, 0, 1, 2, 3])
    features = ImageStatistics()
    for rows in (slice(0, 3), slice(3, 7)):
        features.add(Batch(images[rows], numbers[rows], numbers[rows], numbers[rows]))
    found = features.collect()
    grey = images.numpy().astype(np.float64).mean(1).reshape(7, -1)[np.argsort(numbers.numpy())]
    np.testing.assert_allclose(found["brightness"], grey.mean(1))
    np.testing.assert_allclose(found["contrast"], grey.std(1))


@pytest.fixture
def table(tmp_path):
    """240 images of two classes by their brightness, of two sizes; those of one camera are labelled at random."""
    random = np.random.default_rng(0)
    files, labels, cameras = [], [], []
    for number in range(240):
        label, camera = number % 2, "<b>old" if number % 3 == 0 else "new"
        side = 16 if number % 5 else 24
        pixels = random.integers(0, 80, (side, side, 3)) + (120 if label else 0)
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, format="PNG")
        files.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
        labels.append(label if camera == "new" else int(random.integers(0, 2)))
        cameras.append(camera)
    columns = {"image": files, "label": labels, "camera": cameras, "exposure": random.random(240)}
    pq.write_table(pa.table(columns), tmp_path / "test.parquet")
    return tmp_path


class Threshold(nn.Module):
    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), 40 * (x.mean((1, 2, 3)) - 0.39)], dim=1)


def test_the_columns_of_a_table_are_slices(table):
    images = open_data(str(table), size=16).test
    assert set(read_columns(images)) == {"camera", "exposure"}
    assert sorted(set(read_sizes(images)[:, 0].tolist())) == [16, 24]
    (found,) = measure(load_subject(Threshold(), str(table)), [Slices()])
    arrays = found.arrays
    weak = arrays["slice_p_adjusted"] < 0.05
    assert list(zip(arrays["slice_feature"][weak], arrays["slice_value"][weak], strict=True)) == [("camera", "<b>old")]
    assert found.scalars["weak"].value == 1
    assert {"exposure", "size in pixels"} <= set(arrays["slice_feature"].tolist())
    assert arrays["slice_feature"][arrays["shown_slice"][0]] == "camera"
    assert len(arrays["shown_slice"]) == len(arrays["shown_images"]) == len(arrays["shown_labels"])


def test_a_changed_column_is_measured_again(table):
    before = Slices().conditions(load_subject(Threshold(), str(table)))
    rows = pq.read_table(table / "test.parquet")
    pq.write_table(rows.set_column(2, "camera", pa.array(["new"] * 240)), table / "test.parquet")
    assert Slices().conditions(load_subject(Threshold(), str(table))) != before
    assert Slices().conditions(subject("vit")) == {}
