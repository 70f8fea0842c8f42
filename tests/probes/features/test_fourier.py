"""Delta log amplitude: closed forms, invariances, and the full spectrum in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.anatomy.networks import shaken
from tests.probes.features import notebook
from tests.probes.subjects import subject, vit
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.features.fourier import FLOOR, half_diagonal, log_amplitude

SIZES = [(2, 2), (3, 3), (4, 4), (7, 7), (14, 14), (4, 6), (6, 4), (5, 8), (7, 3), (1, 4), (1, 5), (6, 1), (2, 1)]


def noise(size, seed=0, channels=5):
    return torch.randn(3, channels, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(size, k, phase=0.0):
    rows, columns = np.indices(size)
    return torch.tensor(np.cos(2 * math.pi * k * (rows / size[0] + columns / size[1]) + phase))[None, None]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_full_spectrum_interpolated_gives_the_same(size, dtype):
    maps = noise(size) + 2
    frequencies, expected = notebook.half_diagonal(maps.numpy())
    assert half_diagonal(size).frequencies == pytest.approx(frequencies)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    assert log_amplitude(maps.to(dtype)).numpy() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("layout", ["tokens", "channels last"])
def test_maps_may_be_views_of_any_layout(layout):
    maps = noise((4, 6))
    if layout == "tokens":
        tokens = torch.cat((torch.ones(3, 2, 5), maps.flatten(2).transpose(1, 2)), dim=1)
        view = tokens[:, 2:].reshape(3, 4, 6, 5).permute(0, 3, 1, 2)
    else:
        view = maps.to(memory_format=torch.channels_last)
    assert view.stride() != maps.stride()
    torch.testing.assert_close(log_amplitude(view), log_amplitude(maps))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_constant_map_has_nothing_but_frequency_0(size):
    found = log_amplitude(torch.full((1, 3, *size), -1000.1))  # whose rounding alone is above the floor
    assert found[0, 0].item() == pytest.approx(math.log(1000.1 * size[0] * size[1]), abs=1e-5)
    # Of a side of one position every frequency is the same; interpolation between 0 and another bin weighs both.
    for frequency, value in zip(half_diagonal(size).frequencies, found[0], strict=True):
        if all(side == 1 or frequency * side / 2 >= 1 for side in size):
            assert value.item() == pytest.approx(math.log(FLOOR), abs=1e-5)


def test_a_map_of_zeros_is_finite_and_has_no_delta():
    found = log_amplitude(torch.zeros(2, 3, 7, 7)).numpy()
    assert found == pytest.approx(np.full((2, 5), math.log(FLOOR)), abs=1e-5)


def test_a_checkerboard_is_at_pi():
    rows, columns = np.indices((6, 4))
    maps = torch.tensor(0.5 * (-1.0) ** (rows + columns))[None, None]
    found = log_amplitude(maps)[0]
    assert half_diagonal((6, 4)).frequencies[-1] == 1
    assert found[-1].item() == pytest.approx(math.log(0.5 * 24))
    assert found[0].item() == pytest.approx(math.log(FLOOR))


@pytest.mark.parametrize(("side", "k"), [(8, 1), (8, 3), (7, 1), (7, 2), (14, 6)])
def test_a_cosine_is_at_its_frequency(side, k):
    found = log_amplitude(cosine((side, side), k, phase=0.3))[0]
    assert half_diagonal((side, side)).frequencies[k] == pytest.approx(2 * k / side)
    assert found[k].item() == pytest.approx(math.log(side * side / 2))
    others = [value for index, value in enumerate(found.tolist()) if index not in (k, len(found) - 1)]
    assert others == pytest.approx([math.log(FLOOR)] * len(others))


def test_between_bins_the_log_amplitude_is_interpolated_and_the_result_says_so():
    maps = noise((3, 3))
    diagonal = half_diagonal((3, 3))
    assert diagonal.interpolated.tolist() == [False, False, True]
    log = np.log(np.abs(np.fft.fft2(maps.numpy()))).mean(axis=1)
    assert log_amplitude(maps)[:, -1].numpy() == pytest.approx((log[:, 1, 1] + log[:, 1, 2]) / 2)
    assert half_diagonal((4, 4)).interpolated.tolist() == [False] * 3
    assert half_diagonal((4, 2)).interpolated.tolist() == [False, True, False]
    assert half_diagonal((1, 4)).interpolated.tolist() == [False] * 3
    assert half_diagonal((1, 5)).interpolated.tolist() == [False, False, False, True]


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda size: size != (1, 1))
seeds = st.integers(0, 1000)
few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(sizes, seeds, st.floats(-5, 5))
def test_a_constant_changes_only_frequency_0(size, seed, constant):
    maps = noise(size, seed)
    (_, before), (_, after) = (notebook.half_diagonal(each.numpy()) for each in (maps, maps + constant))
    found = (log_amplitude(maps + constant) - log_amplitude(maps)).numpy()
    assert found == pytest.approx(after - before, abs=1e-8)
    clear = [all(side == 1 or f * side / 2 >= 1 for side in size) for f in half_diagonal(size).frequencies]
    assert found[:, clear] == pytest.approx(np.zeros((3, sum(clear))), abs=1e-8)


@few
@given(sizes, seeds, st.floats(0.01, 100), st.booleans())
def test_a_scale_leaves_delta_alone(size, seed, scale, negative):
    maps = noise(size, seed)
    assume(np.abs(np.fft.fft2(maps)).min() * min(scale, 1) > 10 * FLOOR)
    before, after = (log_amplitude(each) for each in (maps, maps * scale * (-1) ** negative))
    torch.testing.assert_close(after - after[:, :1], before - before[:, :1], atol=1e-8, rtol=0)
    torch.testing.assert_close(after - before, torch.full_like(after, math.log(scale)), atol=1e-8, rtol=0)


@few
@given(sizes, seeds, st.integers(0, 8), st.integers(0, 8))
def test_amplitudes_do_not_see_where_the_image_begins(size, seed, down, right):
    maps = noise(size, seed)
    torch.testing.assert_close(log_amplitude(maps.roll((down, right), (2, 3))), log_amplitude(maps))
    torch.testing.assert_close(log_amplitude(maps.flip(2, 3)), log_amplitude(maps))
    torch.testing.assert_close(log_amplitude(maps.transpose(2, 3)), log_amplitude(maps))


@pytest.mark.parametrize("patch_size", [4, 5, (3, 2)])
def test_the_curves_of_all_units(patch_size):
    patient = subject(shaken(vit(patch_size=patch_size)))
    (found,) = measure(patient, parse_probes(["fourier"]))
    states = notebook.states(patient)
    arrays = found.arrays
    for index, row in enumerate(found.units):
        frequencies, log = notebook.half_diagonal(states[row.name]["output"])
        assert arrays["frequencies"][index] == pytest.approx(frequencies)
        assert arrays["delta_log_amplitude"][index] == pytest.approx((log - log[:, :1]).mean(axis=0), abs=1e-4)
        scalar = row.values["delta_log_amplitude"]
        assert arrays["delta_log_amplitude"][index, -1] == scalar.value
        assert arrays["half_width"][index, -1] == pytest.approx(scalar.high - scalar.value)
    assert arrays["interpolated"][:, -1].all() == (patch_size != 4)


def test_curves_of_coarser_grids_end_earlier():
    (found,) = measure(subject("resnet"), parse_probes(["fourier"]))
    assert found.arrays["frequencies"] == pytest.approx(
        np.array([[0, 0.5, 1], [0, 0.5, 1], [0, 1, math.nan]]), nan_ok=True
    )
    assert np.isnan(found.arrays["delta_log_amplitude"]).tolist() == np.isnan(found.arrays["frequencies"]).tolist()
