"""What is true of the `shapes` set: what depends on what, what is balanced, and that the drawing stays."""

from __future__ import annotations

import numpy as np
import pytest

from vitclinic._core.errors import DataError
from vitclinic.data import shapes
from vitclinic.data.shapes import drawing

N = len(shapes.CLASSES)

# See `test_the_drawing_has_not_changed`.
GOLDEN = [
    [100.33, 107.36, 138.48, 116.49, 15.76],
    [110.92, 114.13, 103.93, 101.27, 32.89],
    [107.79, 100.94, 96.11, 106.13, 39.31],
    [91.59, 101.32, 108.28, 94.44, 40.8],
    [115.14, 127.01, 114.53, 128.39, 25.01],
    [123.38, 121.93, 104.2, 84.67, 19.21],
    [88.35, 55.05, 90.68, 55.91, 27.59],
    [88.37, 86.37, 93.35, 93.76, 33.51],
    [97.94, 94.26, 84.26, 83.64, 12.04],
    [93.21, 104.67, 80.06, 77.72, 19.76],
    [99.66, 99.05, 98.03, 97.69, 24.09],
]


def test_ten_classes_have_ten_partner_textures() -> None:
    assert len(set(shapes.CLASSES)) == len(set(shapes.TEXTURES)) == N == 10


def test_an_image_depends_on_seed_split_and_index_alone() -> None:
    """So a set of 2,000 is a prefix of one of 4,000, and workers may draw in any order."""
    forwards = [shapes.example(3, "train", i)[0] for i in range(30)]
    backwards = [shapes.example(3, "train", i)[0] for i in reversed(range(40))][::-1]
    np.testing.assert_array_equal(forwards, backwards[:30])


def test_images_drawn_together_are_those_drawn_alone() -> None:
    """Bit for bit: batches of 50 end within these 120."""
    together = list(shapes.examples(3, "val", 120, texture_cue=0.5))
    np.testing.assert_array_equal(together, [shapes.example(3, "val", i, texture_cue=0.5)[0] for i in range(120)])


def test_an_image_is_bytes_of_the_size_asked_for() -> None:
    for size in (16, 32, 48):
        image = shapes.draw((0,), 4, 2, size)
        assert image.shape == (size, size, 3)
        assert image.dtype == np.uint8
        assert image.flags.c_contiguous


def test_no_two_images_are_the_same_within_or_between_splits_seeds_and_the_conflict_set() -> None:
    drawn = [shapes.example(seed, split, i)[0] for seed in (0, 1) for split in shapes.SPLITS for i in range(100)]
    drawn += [shapes.cue_conflict(seed, i)[0] for seed in (0, 1) for i in range(100)]
    assert len({image.tobytes() for image in drawn}) == len(drawn) == 800


def test_every_run_of_ten_holds_each_class_once() -> None:
    labels = [shapes.example(0, "val", i)[1] for i in range(40)]
    for start in range(30):
        assert sorted(labels[start : start + N]) == list(range(N))


def test_an_unknown_split_is_refused_with_a_hint() -> None:
    with pytest.raises(DataError, match=r"no split 'tets', only train, val, test\. Did you mean 'test'\?"):
        shapes.example(0, "tets", 0)


def test_without_the_cue_texture_says_nothing_about_shape() -> None:
    """The chi-square of the 10 x 10 table has 81 degrees of freedom: beyond 140 is 1 in 20,000."""
    table = np.zeros((N, N))
    for i in range(2000):
        label, texture = shapes.labels(0, "train", i)
        table[label, texture] += 1
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    assert (table > 0).all()
    assert ((table - expected) ** 2 / expected).sum() < 140


@pytest.mark.parametrize("cue", [0.0, 0.5, 1.0])
def test_the_cue_is_the_share_of_images_in_the_texture_of_their_class(cue: float) -> None:
    pairs = [shapes.labels(0, "train", i, cue) for i in range(2000)]
    share = np.mean([label == texture for label, texture in pairs])
    assert share == pytest.approx(cue + (1 - cue) / N, abs=0.04 * (cue < 1))


def test_the_cue_changes_the_texture_and_nothing_else() -> None:
    changed = 0
    for i in range(20):
        plain, cued = shapes.example(5, "train", i), shapes.example(5, "train", i, texture_cue=1.0)
        assert plain[1] == cued[1] == cued[2]
        np.testing.assert_array_equal(plain[0], shapes.draw((5, 0, i), plain[1], plain[2]))
        np.testing.assert_array_equal(cued[0], shapes.draw((5, 0, i), cued[1], cued[1]))
        changed += not np.array_equal(plain[0], cued[0])
    assert changed >= 15


def test_ninety_conflict_images_hold_each_pair_of_different_classes_once() -> None:
    pairs = [shapes.cue_conflict(2, i)[1:] for i in range(180)]
    every = {(shape, texture) for shape in range(N) for texture in range(N) if shape != texture}
    assert len(every) == 90
    assert set(pairs[:90]) == set(pairs[90:]) == every
    for start in range(0, 90, N):
        assert {shape for shape, _ in pairs[start : start + N]} == set(range(N))
        assert {texture for _, texture in pairs[start : start + N]} == set(range(N))


def test_a_conflict_image_is_drawn_with_the_pair_it_names() -> None:
    image, shape, texture = shapes.cue_conflict(2, 17)
    np.testing.assert_array_equal(image, shapes.draw((2, len(shapes.SPLITS), 17), shape, texture))


def test_the_same_key_in_another_texture_changes_no_pixel_outside_the_fill() -> None:
    """Texture is independent of place, colour and clutter: the rest of the scene stays, noise included."""
    for key in range(10):
        a, b = shapes.draw((key,), 2, 0), shapes.draw((key,), 2, 1)
        same = (a == b).all(-1)
        assert same.mean() > 0.4
        assert not same[shapes.mask((key,), 2) == 1].all()


def test_another_size_is_the_same_scene() -> None:
    for label in range(N):
        coarse, fine = shapes.mask((7,), label, 32), shapes.mask((7,), label, 128)
        pooled = fine.reshape(32, 4, 32, 4).mean((1, 3))
        assert np.abs(pooled - coarse).mean() < 0.02


def test_an_edge_is_anti_aliased_and_the_shape_stays_inside_the_image() -> None:
    for label in range(N):
        for key in range(20):
            mask = shapes.mask((label, key), label)
            partial = ((mask > 0) & (mask < 1)).sum()
            assert 20 < partial < 400
            assert 60 < mask.sum() < 600


def test_outlines_alone_tell_the_classes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one place, size and tilt the nearest of 30 masks a class is of the right class."""
    monkeypatch.setattr(drawing, "_SHIFT", 0.0)
    monkeypatch.setattr(drawing, "_TILT", 0.0)
    monkeypatch.setattr(drawing, "_SCALE", (0.65, 0.65))
    templates = np.stack([shapes.mask((0, k), k % N).ravel() for k in range(30 * N)])
    probes = np.stack([shapes.mask((1, k), k % N).ravel() for k in range(20 * N)])
    nearest = [np.abs(templates - probe).sum(1).argmin() % N for probe in probes]
    assert nearest == [k % N for k in range(20 * N)]


def test_textures_alone_tell_the_partners_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two textures are one pattern: at the same key any two differ on much of a shape."""
    monkeypatch.setattr(drawing, "_NOISE", (0.0, 0.0))
    for key in range(5):
        inside = shapes.mask((key,), 0) == 1
        drawn = [shapes.draw((key,), 0, k)[inside].astype(float) for k in range(N)]
        for a in range(N):
            for b in range(a):
                assert np.abs(drawn[a] - drawn[b]).mean() > 4


def fingerprint(image: np.ndarray) -> list[float]:
    """Mean level of the four quarters, and the mean step between neighbours, which sees texture and noise."""
    levels = image.astype(float)
    quarters = levels.reshape(2, 16, 2, 16, 3).mean((1, 3, 4)).ravel()
    return [round(float(value), 2) for value in (*quarters, np.abs(np.diff(levels, axis=1)).mean())]


def test_the_drawing_has_not_changed() -> None:
    """Of one image a class, and on average of 200 more, which sees what befalls few images.

    By means, so that a last-bit difference of a sine is forgiven.

    If the drawing changed on purpose, every published number on `shapes` changes with it: say so in the
    changelog, and replace GOLDEN by the table in the message of the failure.
    """
    every = [fingerprint(shapes.example(0, "train", i)[0]) for i in range(N + 200)]
    found = [*every[:N], np.mean(every[N:], axis=0).round(2).tolist()]
    np.testing.assert_allclose(found, GOLDEN, atol=0.05, err_msg=f"the table is now\n{found}")
