"""Norms of the softmax's Jacobian: against dense Jacobians of stored maps, closed forms, masks and padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.probes.attention.networks import WINDOWED, built, swin
from tests.probes.attention.oracle import stored_maps
from tests.probes.subjects import subject, vit
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.attention.softmax_jacobian import frobenius_norm, nuclear_norm


def jacobian_norms(patient):
    (measurement,) = measure(patient, parse_probes(["softmax_jacobian"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def dense_norms(row):
    """Nuclear and Frobenius norm of the dense Jacobian that autograd finds at the logits log(a), in float64."""
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(0), row.double().log())
    singular = torch.linalg.svdvals(jacobian)
    return singular.sum().item(), singular.square().sum().sqrt().item()


def rows_of(seen, image):
    """The attention rows of one image over what each query may see, and their heads; padding left out."""
    windows = len(seen.positions())
    for window in range(windows):
        visible = seen.visible()[window]
        for head, per_head in enumerate(seen.weights[image * windows + window].double()):
            for row, sees in zip(per_head, visible, strict=True):
                if sees.any():
                    yield head, row[sees] / row[sees].sum()


@pytest.mark.parametrize("name", ["vit", "vit, registers", "torchvision vit", "swin, padded"])
def test_they_are_those_of_dense_jacobians(name):
    patient = subject(built(name), count=2, batch_size=1)
    found, maps = jacobian_norms(patient), stored_maps(patient)
    ratios = []
    for row, heads in zip(found.units[:2], found.arrays["head_nuclear"], strict=False):
        rows = [(head, each) for image in range(2) for head, each in rows_of(maps[row.name], image)]
        norms = np.array([dense_norms(each) for _, each in rows])
        of_head = np.array([head for head, _ in rows])
        assert row.values["nuclear"].value == pytest.approx(norms[:, 0].mean(), rel=1e-5)
        assert row.values["frobenius"].value == pytest.approx(norms[:, 1].mean(), rel=1e-5)
        assert row.values["maximum"].value == pytest.approx(np.mean([1 - 1 / len(each) for _, each in rows]))
        for head in range(of_head.max() + 1):
            assert heads[head] == pytest.approx(norms[of_head == head, 0].mean(), rel=1e-5)
        ratios.append(norms[:, 0].mean() / row.values["maximum"].value)
        assert row.values["ratio"].value == pytest.approx(ratios[-1], rel=1e-5)
        assert row.values["ratio"].low <= row.values["ratio"].value <= row.values["ratio"].high
    if len(found.units) == 2:
        assert found.scalars["ratio"].value == pytest.approx(np.mean(ratios), rel=1e-5)


def test_a_row_on_one_key_has_none_and_two_equal_keys_have_one_half():
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert nuclear_norm(rows).tolist() == frobenius_norm(rows).tolist() == [0.0, 0.5]


def test_the_nuclear_norm_is_largest_at_uniform_attention_and_the_frobenius_norm_is_not():
    uniform, two = torch.full((4,), 0.25), torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert nuclear_norm(uniform) == 0.75 > nuclear_norm(two)
    assert frobenius_norm(uniform).item() == pytest.approx(3**0.5 / 4)
    assert frobenius_norm(two) > frobenius_norm(uniform)


def test_uniform_attention_has_the_maximum_also_in_shifted_and_padded_windows():
    network = swin((10, 16))  # a grid of 5 x 8, padded to 8 x 8
    for layer in network.layers:
        for block in layer.blocks:
            torch.nn.init.zeros_(block.attn.qkv.weight)
            torch.nn.init.zeros_(block.attn.qkv.bias)
            torch.nn.init.zeros_(block.attn.relative_position_bias_table)
    patient = subject(network, count=3)
    patient.dataset = replace(patient.dataset, size=(10, 16))
    assert jacobian_norms(patient).scalars["ratio"].value == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", ["vit", *WINDOWED])
def test_the_batch_size_changes_nothing(name):
    expected, found = (jacobian_norms(subject(built(name), batch_size=size)) for size in (8, 3))
    for ours, theirs in zip(found.units, expected.units, strict=True):
        for value, scalar in ours.values.items():
            assert scalar.value == pytest.approx(theirs.values[value].value, rel=1e-6), value
    assert found.scalars["ratio"].low == pytest.approx(expected.scalars["ratio"].low, rel=1e-6)


def test_a_single_key_does_not_apply():
    network = vit(patch_size=16, class_token=False, global_pool="avg")
    (measurement,) = measure(subject(network), parse_probes(["softmax_jacobian"]))
    assert measurement.status == "does_not_apply"
    assert "single key" in measurement.reason
