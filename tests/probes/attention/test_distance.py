"""Distance of attention: against loops over stored maps, and closed forms."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.probes.attention.networks import GLOBAL, WINDOWED, built, huggingface, swin
from tests.probes.attention.oracle import distances, stored_maps, whole_grid
from tests.probes.subjects import subject, vit
from vitclinic.anatomy import Windows
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.attention.distance import grid_distances, total_distance


def distance(patient):
    (measurement,) = measure(patient, parse_probes(["attention_distance"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def check(patient, count=5):
    found, maps = distance(patient), stored_maps(patient)
    means = []
    for row, heads in zip(found.units, found.arrays["head_distance"], strict=True):
        seen = maps[row.name]
        weights = seen.weights.double().numpy()[:, :, seen.prefix :, seen.prefix :]
        full = whole_grid(seen) if seen.windows else weights
        tokens = full.shape[-1]
        apart = distances(seen.grid)
        pairs = [full[:, :, i, j].mean() * apart[i, j] for i in range(tokens) for j in range(tokens) if i != j]
        assert row.values["relative_distance"].value == pytest.approx(np.mean(pairs), rel=1e-5)
        assert row.values["distance"].value == pytest.approx(np.sum(pairs) / tokens, rel=1e-5)
        assert row.values["distance"].n == count
        by_head = (full * apart).sum((2, 3)).mean(0) / tokens
        assert heads[: len(by_head)] == pytest.approx(by_head, rel=1e-5)
        assert np.isnan(heads[len(by_head) :]).all()
        means.append(np.sum(pairs) / tokens)
    assert found.scalars["distance"].value == pytest.approx(np.mean(means), rel=1e-5)


@pytest.mark.parametrize("name", [*GLOBAL, *WINDOWED, "huggingface vit", "huggingface deit"])
def test_it_is_that_of_stored_maps(name):
    library, _, kind = name.partition(" ")
    network = huggingface(kind) if library == "huggingface" else built(name)
    if network is None:
        pytest.skip("transformers is not installed")
    check(subject(network, count=5, batch_size=2))


def test_grids_that_are_not_square_and_windows_that_are_padded():
    torch.manual_seed(0)
    patient = subject(swin((10, 16)), count=5, batch_size=2)
    patient.dataset = replace(patient.dataset, size=(10, 16))
    check(patient)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 5)])
def test_of_uniform_attention_it_is_the_mean_distance_of_the_grid(grid):
    height, width = grid
    apart = grid_distances(Windows(grid).positions(grid), grid)
    tokens = height * width
    uniform = torch.full((1, 1, 2, tokens, tokens), 1 / tokens, dtype=torch.float64)
    # |i - j| of two draws from 0 ... n - 1 is (n^2 - 1) / 3n on average; an axis of one place has no distance.
    expected = sum((n + 1) / (3 * n) for n in grid if n > 1)
    torch.testing.assert_close(
        total_distance(uniform, apart) / tokens, torch.full((1, 2), expected, dtype=torch.float64)
    )
    identity = torch.eye(tokens, dtype=torch.float64).expand(1, 1, 2, tokens, tokens)
    assert total_distance(identity, apart).eq(0).all()


def test_uniform_attention_of_a_network():
    network = vit()
    for block in network.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    found = distance(subject(network, count=3))
    # Of 17 keys 16 are on the grid: what goes to the class token has no distance.
    expected = 16 / 17 * 2 * 5 / 12
    assert found.scalars["distance"].value == pytest.approx(expected, rel=1e-6)
    assert found.scalars["relative_distance"].value == pytest.approx(expected / 15, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_looking_the_other_way_round_changes_nothing(height, width, seed):
    """Turning the grid by half a circle turns queries and keys alike."""
    tokens = height * width
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, 1, 2, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
    apart = grid_distances(Windows((height, width)).positions((height, width)), (height, width))
    torch.testing.assert_close(total_distance(weights.flip(-1, -2), apart), total_distance(weights, apart))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    expected, found = (distance(subject(built("vit").to(kind), count=4)) for kind in (torch.float32, dtype))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert found.scalars["distance"].value == pytest.approx(expected.scalars["distance"].value, rel=tolerance)


@pytest.mark.parametrize("batch_size", [1, 3, 22])
def test_the_batch_size_changes_nothing(batch_size):
    expected, found = (distance(subject(built("swin"), batch_size=size)) for size in (8, batch_size))
    for ours, theirs in zip(found.units, expected.units, strict=True):
        assert ours.values["distance"].value == pytest.approx(theirs.values["distance"].value, rel=1e-6)
    assert found.scalars["distance"].high == pytest.approx(expected.scalars["distance"].high, rel=1e-6)


def test_a_grid_of_one_place_does_not_apply():
    (measurement,) = measure(subject(vit(patch_size=16)), parse_probes(["attention_distance"]))
    assert measurement.status == "does_not_apply"
    assert "no distance" in measurement.reason
