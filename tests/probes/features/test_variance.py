"""The variance of feature maps over positions: closed forms and invariances."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic.probes.features.variance import spatial_variance

few = settings(max_examples=40, deadline=None, derandomize=True)


def noise(seed=0, size=(3, 5)):
    return torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_is_divided_by_the_number_of_positions_minus_one():
    torch.testing.assert_close(spatial_variance(noise()), noise().var(dim=(2, 3)).mean(1))
    ramp = torch.arange(4.0).reshape(1, 1, 2, 2)
    assert spatial_variance(ramp).item() == pytest.approx(5 / 3)


def test_a_constant_map_has_none_and_a_checkerboard_the_square_of_its_height():
    assert spatial_variance(torch.full((1, 2, 4, 4), 3.7)).item() == pytest.approx(0, abs=1e-10)
    board = 0.5 * (-1.0) ** torch.arange(8)[:, None] * (-1.0) ** torch.arange(8)
    assert spatial_variance(board[None, None]).item() == pytest.approx(0.25 * 64 / 63)


def test_small_variance_on_a_large_mean_survives_float32():
    maps = (1e3 + 1e-1 * noise(size=(14, 14))).float()
    expected = maps.double().var(dim=(2, 3)).mean(1)
    torch.testing.assert_close(spatial_variance(maps).double(), expected, rtol=1e-4, atol=0)


def test_maps_are_left_as_they_are():
    maps = noise()
    spatial_variance(maps)
    torch.testing.assert_close(maps, noise(), rtol=0, atol=0)


@few
@given(st.integers(0, 1000), st.floats(-100, 100), st.floats(0.01, 100))
def test_a_constant_changes_nothing_and_a_scale_counts_squared(seed, constant, scale):
    maps = noise(seed)
    torch.testing.assert_close(spatial_variance(scale * maps + constant), scale**2 * spatial_variance(maps))


@few
@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_positions_may_be_in_any_order(seed, random):
    maps = noise(seed)
    order = list(range(15))
    random.shuffle(order)
    torch.testing.assert_close(spatial_variance(maps.flatten(2)[:, :, order, None]), spatial_variance(maps))
