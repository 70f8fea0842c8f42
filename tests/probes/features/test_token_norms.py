"""Norms of tokens: against loops over stored states, planted outliers, zeros, thresholds, and prefix tokens apart."""

import math
import statistics

import numpy as np
import pytest
import torch

from tests.anatomy.networks import shaken
from tests.probes.subjects import noise, subject, vit
from vitclinic import functional as F
from vitclinic.anatomy import taps
from vitclinic.probes import TokenNorms, measure, parse_probes
from vitclinic.probes.features.token_norms import EDGES


def norms_of(patient, **options):
    (measurement,) = measure(patient, parse_probes([{"token_norms": options}]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def stored_states(patient):
    """The state after each unit for all images, on its grid and off it, in float64."""
    anatomy = patient.anatomy
    units = [unit for unit in anatomy.units if unit.output.layout.spatial]
    images = torch.cat([batch.images for batch in patient.batches()])
    with taps({unit.name: unit.output for unit in units}) as seen, torch.no_grad():
        patient.network.eval()(images)
    found = {}
    for unit in units:
        activation = seen[unit.name].double()
        prefix = activation[:, : unit.output.layout.prefix] if activation.ndim == 3 else activation[:, :0]
        found[unit.name] = (anatomy.grid(unit.output, activation).numpy(), prefix.numpy())
    return found


def outliers_by_loop(norms, ratio=3.0, score=3.5):
    """Which norms of one image stand out, one by one with the standard library's median."""
    logs = [math.log(norm) for norm in norms if norm > 0]
    if not logs:
        return [False] * len(norms)
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    limit = middle + max(math.log(ratio), score * spread)
    return [norm > 0 and math.log(norm) > limit for norm in norms]


def planted(place=6, size=30.0, **keywords):
    """A ViT whose patch number `place` has a position embedding that makes it stand out from then on."""
    torch.manual_seed(0)
    network = vit(**keywords)
    with torch.no_grad():
        network.pos_embed[:, network.num_prefix_tokens + place] *= 0
        network.pos_embed[:, network.num_prefix_tokens + place, 0] = size
    return network


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer", "torchvision vit"])
def test_numbers_are_those_of_loops_over_stored_states(name):
    patient = subject(name, count=5, batch_size=2)
    found, states = norms_of(patient, ratio=1.2, score=1.0), stored_states(patient)
    some = 0
    for row, mean_map in zip(found.units, found.arrays["mean_norm"], strict=True):
        maps, prefix = states[row.name]
        norms = np.sqrt((maps**2).sum(1))
        flat = norms.reshape(5, -1)
        out = np.array([outliers_by_loop(each, 1.2, 1.0) for each in flat])
        some += out.sum()
        assert row.values["norm"].value == pytest.approx(flat.mean(), rel=1e-5)
        assert row.values["outliers"].value == pytest.approx(out.mean(), abs=1e-12)
        assert row.values["images_with_outliers"].value == pytest.approx(out.any(1).mean(), abs=1e-12)
        peaks = [max(each) / statistics.median(n for n in each if n > 0) for each in flat.tolist()]
        assert row.values["peak"].value == pytest.approx(np.mean(peaks), rel=1e-5)
        height, width = norms.shape[1:]
        np.testing.assert_allclose(mean_map[:height, :width], norms.mean(0), rtol=1e-5)
        assert np.isnan(mean_map[height:]).all()
        assert np.isnan(mean_map[:, width:]).all()
        assert ("prefix_norm" in row.values) == (prefix.shape[1] > 0)
        if prefix.shape[1]:
            assert row.values["prefix_norm"].value == pytest.approx(np.linalg.norm(prefix, axis=-1).mean(), rel=1e-5)
        assert row.values["norm"].n == 5
        assert row.values["norm"].low < row.values["norm"].value < row.values["norm"].high
    assert some > 0  # else the shares compare nothing


def test_the_distribution_is_a_histogram_of_each_image():
    patient = subject("vit", count=5, batch_size=2)
    found, states = norms_of(patient), stored_states(patient)
    assert np.array_equal(found.arrays["edges"], EDGES)
    for row, shares in zip(found.units, found.arrays["distribution"], strict=True):
        norms = np.sqrt((states[row.name][0] ** 2).sum(1)).reshape(-1)
        np.testing.assert_allclose(shares, np.histogram(norms, EDGES)[0] / norms.size, atol=1 / norms.size + 1e-12)
        assert shares.sum() == pytest.approx(1)


def test_a_planted_outlier_is_found_at_its_place_and_from_there_on():
    found = norms_of(subject(planted(place=6), count=4))
    shares = {row.name: row.values["outliers"].value for row in found.units}
    assert shares.pop("stem") == 0
    assert set(shares.values()) == {1 / 16}
    assert found.scalars["outliers_last"].value == found.scalars["outliers_most"].value == 1 / 16
    assert found.scalars["images_with_outliers_most"].value == 1
    for mean_map in found.arrays["mean_norm"][1:]:
        assert np.unravel_index(mean_map.argmax(), (4, 4)) == (1, 2)  # patch 6 of a grid of 4 x 4


def test_before_the_blocks_nothing_counts_for_the_most():
    """Patches of a noisy stem may stand out: that is the image."""
    found = norms_of(subject(shaken(vit()), count=4), ratio=1.01, score=0.0)
    inside = [row.values["outliers"].value for row in found.units if row.name.startswith("blocks")]
    assert found.scalars["outliers_most"].value == max(inside)


def test_a_large_class_token_or_register_is_no_outlier():
    network = planted(size=0.0, reg_tokens=2)
    with torch.no_grad():
        network.cls_token.fill_(50.0)
        network.reg_token.fill_(70.0)
    found = norms_of(subject(network, count=4))
    assert found.scalars["outliers_most"].value == 0
    prefix = found.arrays["prefix_norm"]
    assert prefix.shape == (len(found.units), 3)
    assert np.isnan(prefix[0]).all()  # the stem has none
    assert (prefix[1:, 0] > 200).all()
    assert (prefix[1:, 1:] > 300).all()


def test_a_threshold_counts_every_norm_above_it():
    patient = subject("vit", count=5)
    norms = np.sqrt((stored_states(patient)["blocks.2.mlp"][0] ** 2).sum(1))
    threshold = float(np.median(norms))
    found = norms_of(patient, threshold=threshold)
    assert found.scalars["outliers_last"].value == pytest.approx((norms > threshold).mean())


@pytest.mark.parametrize("seed", range(5))
def test_outliers_with_zeros_are_those_of_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(6, 9, generator=generator, dtype=torch.float64) ** 4
    norms[norms < 0.01] = 0
    norms[0] = 0
    norms[1, 1:] = 0
    expected = [outliers_by_loop(row, 2.0, 1.5) for row in norms.tolist()]
    assert F.outlier_tokens(norms, ratio=2.0, score=1.5).tolist() == expected
    assert sum(map(sum, expected)) > 0


def test_scaling_and_order_change_nothing():
    norms = torch.cat((torch.linspace(1, 2, 30), torch.tensor([9.0]))).expand(2, -1)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(0))
    expected = [False] * 30 + [True]
    assert F.outlier_tokens(norms)[0].tolist() == expected
    assert F.outlier_tokens(1000 * norms)[0].tolist() == expected
    assert F.outlier_tokens(norms[:, order])[0].tolist() == [expected[at] for at in order]


def test_norms_of_tokens_are_pythagoras_in_any_precision():
    h = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert F.token_norms(h.to(dtype)).tolist() == [[5.0, 0.0]]
    with pytest.raises(ValueError, match="ratio must be above 1"):
        F.outlier_tokens(torch.ones(1, 3), ratio=1.0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_size_changes_nothing(batch_size):
    expected, found = (norms_of(subject("vit", batch_size=size), ratio=1.2, score=1.0) for size in (8, batch_size))
    for ours, theirs in zip(found.units, expected.units, strict=True):
        for name, scalar in ours.values.items():
            assert scalar.value == pytest.approx(theirs.values[name].value, rel=1e-5), name
    np.testing.assert_allclose(found.arrays["mean_norm"], expected.arrays["mean_norm"], rtol=1e-5)


def test_a_grid_of_one_position_does_not_apply():
    (measurement,) = measure(subject(vit(patch_size=16), count=3), parse_probes(["token_norms"]))
    assert measurement.status == "does_not_apply"
    assert "single position" in measurement.reason


def test_sums_are_all_there_is():
    tally = TokenNorms().begin(subject("vit", dataset=noise(4)))
    assert len(tally.sums()) == len(tally.layers) * 8
