"""Labels of patches follow crop, flip and mixing: images whose colours are their labels show where each belongs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic.data import Augment, TrainingStream, open_data
from vitclinic.data.token_labels import Frames, LabelMaps, TokenLabels, blend_targets, frame_labels, read_maps

CELLS, SIDE = 4, 32


def painted(count, side, cells, seed=0):
    """Return maps of three classes [count, cells, cells, 3], and images that are painted in these shares."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(3), (count, cells, cells))
    shares = np.round(shares * 255)
    pixels = shares.repeat(side // cells, 1).repeat(side // cells, 2).astype(np.uint8)
    return (shares / 255).astype(np.float16), pixels


def make_stream(augment, side=SIDE, count=6, cells=CELLS, grid=(8, 8), **options):
    """Return a stream of painted images; the data is `shapes` with other pixels."""
    shares, pixels = painted(count, side, cells)
    dataset = open_data(f"shapes:{count}", size=side)
    stream = TrainingStream(dataset, augment, seed=3)
    stream.split = type(stream.split)(Painted(pixels), np.arange(count), np.arange(count) % 3)
    stream.classes = 3
    stream.token_labels = TokenLabels(LabelMaps(shares, None, np.arange(count), 3), grid, **options)
    return stream


class Painted:
    """A store of images that are given."""

    digest, skipped = "painted", []

    def __init__(self, pixels):
        self.pixels, self.kept = pixels, np.arange(len(pixels))

    def read(self, indices):
        return self.pixels[indices]


def shown_in(images, grid):
    """Return the mean colour of each patch, scaled to shares."""
    mean = F.adaptive_avg_pool2d(images, grid).flatten(2).transpose(1, 2)
    return mean / mean.sum(2, keepdim=True)


@pytest.mark.parametrize(
    ("level", "mixed", "exact"),
    [
        ("light", {}, True),
        ("light", {"mixup": 0.8}, True),
        ("light", {"cutmix": 1.0, "cutmix_cell": 8}, True),
        ("none", {"cutmix": 1.0}, True),
        ("light", {"mixup": 0.8, "cutmix": 1.0}, False),
    ],
    ids=["crop and flip", "mixup", "cells", "cutmix", "all"],
)
def test_labels_land_on_the_patches_that_show_them(level, mixed, exact):
    """Exact unless a patch has a border of the map and one of CutMix: then its labels are mixed by area alone."""
    batch = make_stream(Augment(level=level, **mixed))[range(1, 40)]  # beginning in the middle of a pair
    assert torch.allclose(batch.patch_targets.sum(2), torch.ones(39, 64), atol=1e-3)
    inside = F.adaptive_avg_pool2d(batch.images.sum(1, keepdim=True), (8, 8)).flatten(1) > 0.985  # without padding
    error = (shown_in(batch.images, (8, 8)) - batch.patch_targets).abs().amax(2)[inside]
    assert inside.float().mean() > 0.5
    assert (error < 0.01).float().mean() > (0.9999 if exact else 0.9)
    assert error.mean() < 0.01
    if mixed:
        assert len({tuple(row) for row in batch.patch_targets.flatten(1).round(decimals=2).tolist()}) > 30


@pytest.mark.parametrize("mixed", [{}, {"cutmix": 1.0}], ids=["plain", "cutmix"])
def test_labels_follow_resized_crops_of_photographs(mixed):
    stream = make_stream(Augment(level="light", **mixed), side=96)
    batch = stream[range(0, 24)]
    error = (shown_in(batch.images, (8, 8)) - batch.patch_targets).abs()
    assert error.mean() < 0.01  # bicubic interpolation blurs the borders of cells
    wrong = (shown_in(batch.images.flip(3), (8, 8)) - batch.patch_targets).abs()
    assert wrong.mean() > 10 * error.mean()


def test_an_image_that_is_not_augmented_has_its_own_map():
    stream = make_stream(Augment(level="none"), grid=(4, 4))
    batch = stream[range(0, 6)]
    assert torch.allclose(batch.patch_targets, stream.token_labels.maps.read(batch.indices.numpy()).flatten(1, 2))
    assert batch.targets.tolist() == (batch.indices % 3).tolist()


@given(
    left=st.floats(0, 0.6), top=st.floats(0, 0.6), width=st.floats(0.2, 0.4), height=st.floats(0.2, 0.4),
    mirrored=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_patch_has_the_mean_of_what_it_shows(left, top, width, height, mirrored, seed):
    """Against many points of each patch, looked up in the map one by one."""
    maps = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(5), (1, 3, 4)))
    box = np.array([[left, top, left + width, top + height]])
    labels = frame_labels(maps, Frames(box, np.array([mirrored])), (2, 3))[0]
    points = (np.arange(200) + 0.5) / 200
    for row in range(2):
        for column in range(3):
            y = top + height * (row + points) / 2
            x = left + width * ((2 - column if mirrored else column) + points) / 3
            seen = maps[0][np.minimum((y * 3).astype(int), 2)][:, np.minimum((x * 4).astype(int), 3)].mean((0, 1))
            assert labels[row * 3 + column] == pytest.approx(seen, abs=0.02)


def test_targets_of_images_are_the_data_s_the_teacher_s_or_both():
    augment = Augment(level="light", smoothing=0.1)
    ours, taught, both = (make_stream(augment, class_targets=kind)[range(6)] for kind in ("labels", "teacher", "blend"))
    truth = F.one_hot(ours.indices % 3, 3) * 0.9 + 0.1 / 3
    mean = taught.patch_targets.mean(1)
    assert torch.allclose(ours.targets, truth)
    assert torch.allclose(taught.targets, mean)
    part = torch.where(truth.argmax(1) == mean.argmax(1), 0.5, 0.9)[:, None]
    assert torch.allclose(both.targets, part * mean + (1 - part) * truth)
    assert torch.allclose(both.targets, blend_targets(truth, mean))


def test_batches_of_any_size_have_the_same_labels():
    stream = make_stream(Augment(level="light", mixup=0.8, cutmix=1.0))
    whole = stream[range(0, 12)].patch_targets
    parts = torch.cat([stream[range(start, start + 3)].patch_targets for start in range(0, 12, 3)])
    assert torch.equal(whole, parts)


def test_files_that_do_not_fit_are_told(tmp_path):
    from safetensors.numpy import save_file

    shares = np.full((3, 2, 2, 5), 0.2, np.float16)
    cases = {
        "of 3 images": (shares, None, 4, 5),
        "of 5 classes": (shares, None, 3, 6),
        "below 4": (shares, np.full(shares.shape, 4, np.int32), 3, 4),
        "no numbers": (shares[0], None, 3, 5),
    }
    for number, (sentence, (values, labels, count, classes)) in enumerate(cases.items()):
        path = tmp_path / f"{number}.safetensors"
        save_file({"shares": values} if labels is None else {"shares": values, "labels": labels}, path)
        with pytest.raises(Exception, match=sentence):
            read_maps(path, count, classes)
    (tmp_path / "text").write_text("not labels")
    with pytest.raises(Exception, match="cannot be read"):
        read_maps(tmp_path / "text", 3, 5)
