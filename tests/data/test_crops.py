"""Crops with changed colours: from the sample's key alone, in range, and what each change leaves alone."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitclinic.data import crops
from vitclinic.data.augment import random_resized_crop
from vitclinic.data.crops import Crop, blur, change_colours
from vitclinic.data.randomness import view_keys

KEYS = np.arange(64, dtype=np.uint64)


def pictures(channels: int = 3, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (64, size, size, channels), dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_depends_on_its_sample_alone(channels: int) -> None:
    crop = Crop((8, 8), (0.1, 0.5), blur=0.5, solarize=0.3)
    whole = crop(pictures(channels), KEYS)
    assert whole.shape == (64, channels, 8, 8)
    assert 0 <= whole.min() <= whole.max() <= 1
    torch.testing.assert_close(crop(pictures(channels)[40:50], KEYS[40:50]), whole[40:50], rtol=0, atol=1e-6)
    assert not torch.equal(crop(pictures(channels), view_keys(KEYS, 1)), whole)


def test_a_crop_shows_a_share_of_the_area_within_its_scale() -> None:
    """A ramp over the whole image: its range in a crop is the share of the side that is seen."""
    ramp = np.broadcast_to(np.linspace(0, 255, 200, dtype=np.uint8)[None, None, :, None], (64, 200, 200, 1))
    across = random_resized_crop(ramp, KEYS, (64, 64), (0.1, 0.3))
    down = random_resized_crop(np.ascontiguousarray(ramp.transpose(0, 2, 1, 3)), KEYS, (64, 64), (0.1, 0.3))
    area = np.ptp(across.astype(float), axis=(1, 2, 3)) * np.ptp(down.astype(float), axis=(1, 2, 3)) / 255**2
    assert 0.08 < area.min() < 0.14
    assert 0.26 < area.max() < 0.32


def test_turning_the_hue_keeps_grey_and_the_sum_of_channels_and_goes_round() -> None:
    x = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    turned = crops._turn_hue(x, np.array([0.1, -0.3, 1.0]))
    torch.testing.assert_close(turned.sum(1), x.sum(1))
    torch.testing.assert_close(turned[2], x[2], rtol=0, atol=1e-5)
    third = crops._turn_hue(x[:1], np.array([1 / 3]))[0]  # a third of a turn moves each channel to the next
    torch.testing.assert_close(third, x[0].roll(1, 0), rtol=0, atol=1e-5)
    grey = torch.full((1, 3, 2, 2), 0.3)
    torch.testing.assert_close(crops._turn_hue(grey, np.array([0.4])), grey)


def test_about_a_fifth_is_grey_and_a_fifth_of_the_rest_keeps_its_colours() -> None:
    keys = np.arange(4000, dtype=np.uint64)
    x = torch.tensor([0.6, 0.4, 0.5])[None, :, None, None].expand(4000, 3, 1, 1).clone()
    out = change_colours(x, keys)[:, :, 0, 0]
    grey = (out.amax(1) - out.amin(1)) < 1e-6
    kept = (out - x[:, :, 0, 0]).abs().amax(1) < 1e-6
    assert grey.float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert kept.float().mean().item() == pytest.approx(0.2 * 0.8, abs=0.03)


def test_blur_is_that_of_a_dense_gaussian() -> None:
    x = torch.rand(4, 2, 112, 112, generator=torch.Generator().manual_seed(0))
    out = blur(x.clone(), KEYS[:4], 1.0)
    low, high = 0.05, 1.0
    draws = crops.uniforms(KEYS[:4], "blur", 2)[:, 1]
    for row in range(4):
        assert torch.allclose(out[row], _blurred(x[row], low + (high - low) * draws[row]), atol=1e-5)
    assert torch.equal(blur(x.clone(), KEYS[:4], 0.0), x)


def _blurred(x_chw: Tensor, sigma: float) -> Tensor:
    """By a matrix over rows and columns, mirrored at the borders, cut off at 3 pixels."""
    if sigma <= 0.2:
        return x_chw
    size = x_chw.shape[1]
    weights = np.exp(-0.5 * (np.arange(-3, 4) / sigma) ** 2)
    matrix = np.zeros((size, size))
    for row in range(size):
        for offset, weight in zip(range(-3, 4), weights / weights.sum(), strict=True):
            place = abs(row + offset)
            matrix[row, place if place < size else 2 * (size - 1) - place] += weight
    m = torch.from_numpy(matrix).float()
    return m @ x_chw @ m.T
