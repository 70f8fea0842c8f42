"""CutMix on patch borders, held against a count of pixels."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitclinic._core.errors import RecipeError
from vitclinic.data import Augment, TrainingStream, open_data
from vitclinic.data.augment import PatchMixing, soft_targets
from vitclinic.data.randomness import sample_keys

CELLED = Augment(level="light", cutmix=1.0, cutmix_cell=2, smoothing=0.1)


def keys(count, seed=0):
    return sample_keys(seed, np.zeros(count, np.int64), np.arange(count))


def sources(count, height, width):
    """Images that say of every pixel which image it comes from, and where it was."""
    number = torch.arange(count).float()[:, None, None].expand(count, height, width)
    place = torch.arange(height * width).float().view(1, height, width).expand(count, -1, -1)
    return torch.stack([number, place], dim=1)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_every_cell_has_one_source_and_its_label(rows, columns, height, width, seed):
    count, classes = 24, 4
    x = sources(count, rows * height, columns * width)
    labels = torch.arange(count) % classes
    shares = soft_targets(labels, classes, 0.1)
    mixing = PatchMixing(1.0, 0.9, [height, width], (rows * height, columns * width))
    partner = np.roll(np.arange(count), 1)
    mixed, targets, patch_targets = mixing(x, shares, partner, keys(count, seed))
    assert mixed.shape == x.shape
    assert torch.equal(mixed[:, 1], x[:, 1])  # nothing is moved
    assert patch_targets.shape == (count, rows * columns, classes)
    for image in range(count):
        mean = torch.zeros(classes)
        for row in range(rows):
            for column in range(columns):
                cell = mixed[
                    image, 0, row * height : (row + 1) * height, column * width : (column + 1) * width
                ].unique()
                assert len(cell) == 1
                assert int(cell) in (image, partner[image])
                assert torch.equal(patch_targets[image, row * columns + column], shares[int(cell)])
        for pixel in mixed[image, 0].flatten():
            mean += shares[int(pixel)] / mixed[image, 0].numel()
        assert torch.allclose(targets[image], mean, atol=1e-5)  # lambda is the share of the mask


def test_the_partner_s_cells_are_one_box():
    mixed, _, _ = PatchMixing(1.0, 1.0, 1, (6, 8))(sources(60, 6, 8), torch.eye(60), np.arange(60) ^ 1, keys(60))
    cut = (mixed[:, 0] != torch.arange(60)[:, None, None]).numpy()
    boxed = 0
    for mask in cut:
        row, column = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if len(row):
            assert mask[row[0] : row[-1] + 1, column[0] : column[-1] + 1].all()
            boxed += not mask.all()
    assert boxed > 40


def test_lambda_follows_beta_where_the_grid_is_fine_and_the_box_inside():
    """CutMix's box keeps the image's proportions: on a fine grid its height is sqrt(1 - lambda) of the image's."""
    mixing = PatchMixing(0.8, 1.0, 1, (200, 200))
    masks = mixing._masks(keys(1500))
    rows = masks.any(axis=2).sum(axis=1)
    low, high = masks.any(axis=2).argmax(axis=1), 200 - masks.any(axis=2)[:, ::-1].argmax(axis=1)
    inside = (low > 0) & (high < 200) & (rows > 0)
    keep = 1 - (rows[inside] / 200) ** 2
    # A box of side s lies inside for a share 1 - s of the centres.
    grid = np.linspace(0, 1, 4001)[1:-1]
    weight = stats.beta(0.8, 0.8).pdf(grid) * (1 - np.sqrt(1 - grid))
    cdf = np.cumsum(weight) / weight.sum()
    assert stats.kstest(keep, lambda x: np.interp(x, grid, cdf)).pvalue > 0.01


def test_the_share_that_is_left_alone():
    x = sources(400, 8, 8)
    mixed, targets, _ = PatchMixing(1.0, 0.5, 1, (8, 8))(x, torch.eye(400), np.arange(400) ^ 1, keys(400))
    same = (mixed == x).flatten(1).all(dim=1)
    assert 170 < same.sum() < 260
    assert torch.equal(targets[same], torch.eye(400)[same])


@pytest.mark.parametrize("cuts", [[0, 64], [0, 7, 8, 21, 64], list(range(65))])
def test_any_division_into_batches_gives_the_same_samples(cuts):
    stream = TrainingStream(open_data("digits"), CELLED, seed=5)
    whole = stream[range(1400, 1464)]  # across the end of the first epoch
    parts = [stream[range(1400 + a, 1400 + b)] for a, b in pairwise(cuts)]
    assert whole.patch_targets.shape == (64, 16, 10)
    for field in ("images", "targets", "patch_targets", "indices", "keys"):
        assert torch.equal(torch.cat([getattr(p, field) for p in parts]), getattr(whole, field)), field


def test_workers_change_nothing():
    stream = TrainingStream(open_data("digits"), CELLED, seed=5)
    requests = [range(i * 16, (i + 1) * 16) for i in range(3)]
    for a, b in zip(stream.batches(requests, 0), stream.batches(requests, 1), strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.patch_targets, b.patch_targets)


def test_other_augmentation_has_no_patch_targets():
    digits = open_data("digits")
    assert TrainingStream(digits, Augment(level="deit"), seed=5)[range(4)].patch_targets is None
    assert TrainingStream(digits, Augment(level="light"), seed=5)[range(4)].patch_targets is None


def test_images_that_do_not_divide_are_a_sentence():
    with pytest.raises(RecipeError, match="8 x 8 pixels cannot be divided into cells of 3 x 3"):
        TrainingStream(open_data("digits"), Augment(cutmix=1.0, cutmix_cell=3), seed=0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"cutmix_cell": 2}, "needs a cutmix above 0 and mixup 0"),
        ({"level": "deit", "cutmix_cell": 2}, "needs a cutmix above 0 and mixup 0"),
        ({"cutmix": 1.0, "cutmix_cell": 0}, "a number of pixels, or"),
        ({"cutmix": 1.0, "cutmix_cell": [2, 2, 2]}, "a number of pixels, or"),
    ],
)
def test_cells_that_make_no_sense(parts, message):
    with pytest.raises(ValueError, match=message):
        Augment(**parts)
