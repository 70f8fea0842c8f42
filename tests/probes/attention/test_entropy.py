"""Entropy of attention: against maps that are stored whole, closed forms, masks and padding."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.probes.attention.networks import GLOBAL, WINDOWED, built, huggingface, swin
from tests.probes.attention.oracle import stored_maps
from tests.probes.subjects import subject, vit
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.attention.entropy import row_entropy
from vitclinic.treatments import treat


def entropy(patient):
    (measurement,) = measure(patient, parse_probes(["attention_entropy"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def rows_of(seen, images):
    """The entropies of each image, [B, H * queries that count], with log(keys) of each query, one row at a time."""
    weights = seen.weights.double().numpy()
    places = seen.positions().numpy()
    seam = seen.windows.regions(seen.grid).numpy() if seen.windows else np.zeros(places.shape[:2])
    found, maxima = [[] for _ in range(images)], []
    for group, maps in enumerate(weights):
        image, window = divmod(group, len(places))
        for head, per_head in enumerate(maps):
            for query, row in enumerate(per_head):
                place = query - seen.prefix
                if place >= 0 and places[window, place, 0] < 0:
                    continue
                keep = np.ones(len(row), bool)
                if seen.windows:
                    keep = (places[window, :, 0] >= 0) & (seam[window] == seam[window, place])
                p = row[keep] / row[keep].sum()
                found[image].append(-sum(a * math.log(a) for a in p if a > 0))
                if image == head == 0:
                    maxima.append(math.log(keep.sum()))
    return np.array(found), np.array(maxima)


@pytest.mark.parametrize("name", [*GLOBAL, *WINDOWED, "huggingface vit", "huggingface deit"])
def test_it_is_that_of_stored_maps(name):
    library, _, kind = name.partition(" ")
    network = huggingface(kind) if library == "huggingface" else built(name)
    if network is None:
        pytest.skip("transformers is not installed")
    patient = subject(network, count=5, batch_size=2)
    found, maps = entropy(patient), stored_maps(patient)
    ratios, upper_ratios = [], []
    for row, heads in zip(found.units, found.arrays["head_entropy"], strict=True):
        entropies, maxima = rows_of(maps[row.name], 5)
        by_head = entropies.reshape(5, maps[row.name].weights.shape[1], -1) if not maps[row.name].windows else None
        assert row.values["entropy"].value == pytest.approx(entropies.mean(), rel=1e-5)
        assert row.values["upper"].value == pytest.approx(np.percentile(entropies, 85, axis=1).mean(), rel=1e-5)
        assert row.values["maximum"].value == pytest.approx(maxima.mean(), rel=1e-12)
        assert row.values["ratio"].value == pytest.approx(entropies.mean() / maxima.mean(), rel=1e-5)
        assert row.values["entropy"].n == 5
        assert row.values["entropy"].low < row.values["entropy"].value < row.values["entropy"].high
        if by_head is not None:
            assert heads == pytest.approx(by_head.mean((0, 2)), rel=1e-5)
        assert np.nanmean(heads) == pytest.approx(entropies.mean(), rel=1e-5)
        ratios.append(entropies.mean() / maxima.mean())
        upper_ratios.append(np.percentile(entropies, 85, axis=1).mean() / maxima.mean())
    assert found.scalars["ratio"].value == pytest.approx(np.mean(ratios), rel=1e-5)
    assert found.scalars["upper_ratio"].value == pytest.approx(np.mean(upper_ratios), rel=1e-5)


@pytest.mark.parametrize(("name", "prefix"), [("vit", 1), ("vit, two prefix tokens", 2), ("vit, registers", 4)])
def test_the_class_token_and_the_patches_apart(name, prefix):
    patient = subject(built(name), count=5, batch_size=2)
    found, maps = entropy(patient), stored_maps(patient)
    ratios = []
    for row in found.units:
        entropies = torch.special.entr(maps[row.name].weights.double()).sum(-1)
        assert row.values["class_entropy"].value == pytest.approx(entropies[:, :, 0].mean().item(), rel=1e-5)
        assert row.values["patch_entropy"].value == pytest.approx(entropies[:, :, prefix:].mean().item(), rel=1e-5)
        ratios.append(row.values["class_entropy"].value / math.log(16 + prefix))
    assert found.scalars["class_ratio"].value == pytest.approx(np.mean(ratios), rel=1e-6)


def test_a_register_is_no_class_token():
    found = entropy(subject(built("vit, registers, no class token"), count=3))
    assert "class_ratio" not in found.scalars
    assert "class_entropy" not in found.units[0].values
    assert "patch_entropy" in found.units[0].values
    found = entropy(subject(built("vit, no class token"), count=3))
    assert not {"class_entropy", "patch_entropy"} & found.units[0].values.keys()


def test_uniform_attention_has_the_logarithm_of_the_number_of_keys():
    network = vit()
    for block in network.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    found = entropy(subject(network, count=3))
    for row in found.units:
        for name in ("entropy", "upper", "class_entropy", "patch_entropy", "maximum"):
            assert row.values[name].value == pytest.approx(math.log(17), rel=1e-6)
    assert found.scalars["ratio"].value == pytest.approx(1, rel=1e-6)


def test_uniform_attention_in_shifted_and_padded_windows_has_the_maximum_of_what_it_may_see():
    network = swin((10, 16))  # a grid of 5 x 8, padded to 8 x 8
    for layer in network.layers:
        for block in layer.blocks:
            torch.nn.init.zeros_(block.attn.qkv.weight)
            torch.nn.init.zeros_(block.attn.qkv.bias)
            torch.nn.init.zeros_(block.attn.relative_position_bias_table)
    patient = subject(network, count=3)
    patient.dataset = replace(patient.dataset, size=(10, 16))
    found = entropy(patient)
    assert found.scalars["ratio"].value == pytest.approx(1, rel=1e-6)
    # Windows hold 4 rows or 1, and 4 columns; shifted, the last two columns and the first two do not see each other.
    for row, cells in zip(found.units, [(16, 16, 4, 4), (16, 8, 8, 4, 2, 2)], strict=False):
        assert row.values["maximum"].value == pytest.approx(sum(n * math.log(n) for n in cells) / 40)


@pytest.mark.parametrize("fused", [True, False])
def test_masked_keys_of_local_attention_do_not_count(fused):
    network = vit()
    for block in network.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
        block.attn.fused_attn = fused
    local = treat(network, {"local_attention": {"kernel": 3}})
    found = entropy(subject(local, count=3))
    near = [(2 + (0 < r < 3)) * (2 + (0 < c < 3)) + 1 for r in range(4) for c in range(4)]
    expected = (math.log(17) + sum(map(math.log, near))) / 17
    assert found.units[0].values["maximum"].value == pytest.approx(expected)
    assert found.scalars["ratio"].value == pytest.approx(1, rel=1e-6)


def test_one_hot_rows_have_none_and_uniform_rows_all():
    assert row_entropy(torch.eye(7)[None]).eq(0).all()
    torch.testing.assert_close(row_entropy(torch.full((2, 3, 4, 5), 0.2)), torch.full((2, 3, 4), math.log(5)))


@settings(deadline=None, max_examples=50)
@given(arrays.arrays(np.float64, (3, 6), elements=st.floats(-30, 30)), st.permutations(range(6)))
def test_it_lies_between_0_and_the_maximum_and_does_not_depend_on_the_order_of_keys(scores, order):
    rows = torch.from_numpy(scores).softmax(-1)
    found = row_entropy(rows)
    assert (found >= 0).all()
    assert (found <= math.log(6) + 1e-12).all()
    torch.testing.assert_close(row_entropy(rows[:, order]), found)
    torch.testing.assert_close(found, torch.special.entr(rows).sum(-1))
    # A hidden key: as if it were not there.
    visible = torch.arange(6) != 2
    alone = torch.from_numpy(np.delete(scores, 2, axis=1)).softmax(-1)
    torch.testing.assert_close(row_entropy(rows, visible), row_entropy(alone), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(arrays.arrays(np.float64, 5, elements=st.floats(-4, 4)), st.floats(0.1, 3))
def test_the_softmax_jacobian_s_nuclear_norm_is_largest_at_uniform_attention(scores, scale):
    """[hyeonwoo2023 Sec. 3.1]: |J|_* = scale * sum(a - a^2) <= scale * (1 - 1/N)."""
    s = torch.from_numpy(scores)
    jacobian = torch.func.jacrev(lambda x: (scale * x).softmax(-1))(s)
    a = (scale * s).softmax(-1)
    nuclear = torch.linalg.svdvals(jacobian).sum().item()
    assert nuclear == pytest.approx(scale * (a - a**2).sum().item(), rel=1e-9)
    assert nuclear <= scale * (1 - 1 / 5) + 1e-9
    uniform = torch.func.jacrev(lambda x: (scale * x).softmax(-1))(torch.zeros(5, dtype=torch.float64))
    assert torch.linalg.svdvals(uniform).sum().item() == pytest.approx(scale * (1 - 1 / 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    expected = entropy(subject(built("vit"), count=4))
    found = entropy(subject(built("vit").to(dtype), count=4))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert found.scalars["ratio"].value == pytest.approx(expected.scalars["ratio"].value, rel=tolerance)
    assert all(row.values["upper"].value <= row.values["maximum"].value + 1e-6 for row in found.units)


def test_half_precision_rows_are_made_to_sum_to_one():
    rows = torch.full((1, 1, 1, 197), 1 / 197).bfloat16()
    assert row_entropy(rows).item() == pytest.approx(math.log(197), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 22])
def test_the_batch_size_changes_nothing(batch_size):
    expected, found = (entropy(subject(built("swin, padded"), batch_size=size)) for size in (8, batch_size))
    for ours, theirs in zip(found.units, expected.units, strict=True):
        for name, scalar in ours.values.items():
            assert scalar.value == pytest.approx(theirs.values[name].value, rel=1e-6), name
    assert found.scalars["ratio"].low == pytest.approx(expected.scalars["ratio"].low, rel=1e-6)


def test_a_single_key_does_not_apply():
    network = vit(patch_size=16, class_token=False, global_pool="avg")
    (measurement,) = measure(subject(network), parse_probes(["attention_entropy"]))
    assert measurement.status == "does_not_apply"
    assert "single key" in measurement.reason


def test_one_image_has_no_interval():
    found = entropy(subject(built("vit"), limit=1))
    assert (found.scalars["ratio"].n, found.scalars["ratio"].low) == (1, None)
