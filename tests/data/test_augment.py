import random

import numpy as np
import pytest
import torch

from vitclinic.data import Augment
from vitclinic.data.augment import Augmenter, RandAugment, erase, flip, random_resized_crop, shift_crop
from vitclinic.data.randomness import sample_keys, uniforms


def keys(count, seed=0):
    return sample_keys(seed, np.zeros(count, np.int64), np.arange(count))


def noise(count, size=32, channels=3):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, channels), dtype=np.uint8)


def test_shift_crop_against_a_loop():
    images, k = noise(50, 8), keys(50)
    offsets = (uniforms(k, "shift", 2) * 3).astype(int)
    cropped = shift_crop(images, k, padding=1)
    for image, (y, x), result in zip(images, offsets, cropped, strict=True):
        padded = np.zeros((10, 10, 3), np.uint8)
        padded[1:9, 1:9] = image
        assert np.array_equal(result, padded[y : y + 8, x : x + 8])
    assert {tuple(o) for o in offsets} == {(y, x) for y in range(3) for x in range(3)}


def test_flip_mirrors_about_half():
    images, k = noise(400, 4), keys(400)
    flipped = flip(images, k)
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, images, strict=True)]
    assert 160 < sum(mirrored) < 240
    assert all(m or np.array_equal(a, b) for m, a, b in zip(mirrored, flipped, images, strict=True))


def test_resized_crop_covers_8_to_100_percent_in_3_4_to_4_3():
    ramp = np.zeros((200, 200, 3), np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = np.arange(200)[None, :], np.arange(200)[:, None]
    views = random_resized_crop([ramp] * 300, keys(300), (64, 64)).astype(float)
    width = (views[:, 32, -1, 0] - views[:, 32, 0, 0]) / 63 * 64
    height = (views[:, -1, 32, 1] - views[:, 0, 32, 1]) / 63 * 64
    share, aspect = width * height / 200**2, width / height
    assert 0.06 < share.min() < 0.12
    assert share.max() > 0.9
    assert 0.68 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.45


def test_erasing_leaves_the_rest_alone_and_stays_in_range():
    images = torch.full((300, 3, 16, 16), 0.5)
    erased = erase(images.clone(), keys(300), 0.25)
    changed = (erased != 0.5).any(dim=1)
    touched = changed.flatten(1).any(dim=1).float().mean()
    share = changed.flatten(1).float().mean(dim=1)
    assert 0.18 < touched < 0.32
    assert share[share > 0].min() > 0.01
    assert share.max() < 0.45
    assert erased.min() >= 0
    assert erased.max() <= 1


def test_erasing_each_image_its_own_box():
    erased = erase(torch.full((20, 1, 16, 16), 0.5), keys(20), 1.0)
    assert len({tuple((image != 0.5).flatten().tolist()) for image in erased}) == 20


@pytest.mark.parametrize("channels", [1, 3])
def test_randaugment_draws_a_policy_a_sample_and_leaves_global_generators_alone(channels):
    images = np.repeat(noise(1, 32, channels), 60, axis=0)
    transform = RandAugment("rand-m9-n2-mstd0.5-inc1", (32, 32))
    random.seed(1)
    np.random.seed(1)
    before = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    changed = transform(images, keys(60))
    assert (random.random(), np.random.random()) == before
    assert changed.shape == images.shape
    assert len({image.tobytes() for image in changed}) > 30  # p = 0.5 for each of two operations
    again = np.concatenate([transform(images[i : i + 1], keys(60)[i : i + 1]) for i in range(60)])
    assert np.array_equal(changed, again)


def test_randaugment_at_full_magnitude_survives_posterising_to_nothing():
    RandAugment("rand-m10-n4-p1.0-inc1", (32, 32))(noise(200), keys(200))


@pytest.mark.parametrize("policy", ["original", "v0-mstd0.5"])
def test_autoaugment_draws_a_policy_a_sample(policy):
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    augment, keys = RandAugment(policy, (16, 16)), np.arange(6, dtype=np.uint64)
    whole = augment(images, keys)
    assert np.array_equal(augment(images[3:], keys[3:]), whole[3:])
    assert not np.array_equal(whole, images)


def test_levels():
    assert Augment(level="light").resolve().mixup == 0
    deit = Augment(level="deit", mixup=0.2).resolve()
    assert (deit.mixup, deit.cutmix, deit.erasing, deit.smoothing, deit.repeats) == (0.2, 1.0, 0.25, 0.1, 3)
    plain = Augmenter(Augment(level="none"), (32, 32))(noise(4), keys(4))
    assert torch.equal(plain, torch.from_numpy(noise(4)).permute(0, 3, 1, 2).float() / 255)


@pytest.mark.parametrize("size", [32, 96])
def test_without_flip_images_are_cropped_the_same_and_none_is_mirrored(size):
    with_flip, without = (
        Augmenter(Augment(flip=flip), (size, size))(noise(20, size), keys(20)) for flip in (None, False)
    )
    mirrored = uniforms(keys(20), "flip", 1)[:, 0] < 0.5
    assert torch.equal(without[mirrored], with_flip[mirrored].flip(-1))
    assert torch.equal(without[~mirrored], with_flip[~mirrored])
    with pytest.raises(ValueError, match="flip is a part of the levels light and deit"):
        Augment(level="none", flip=True)


def test_the_identity_is_that_of_before_flip_unless_it_changes_the_level():
    for level in ("none", "light", "deit"):
        assert "flip" not in Augment(level=level).identity()
        assert "flip" not in Augment(level=level).resolve().identity()
    assert Augment(flip=False).identity()["flip"] is Augment(flip=False).resolve().identity()["flip"] is False
