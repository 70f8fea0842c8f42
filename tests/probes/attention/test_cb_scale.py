"""The scales of Context Broadcasting: found wherever they are, and numpy's quantiles."""

import numpy as np
import pytest
import torch

from tests.probes.subjects import noise, subject, vit
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.attention.cb_scale import quantile_ratio
from vitclinic.treatments import treat


def treated(seed=0, network=None, **options):
    network = treat(network or vit(), {"context_broadcasting": {"scaled": True, **options}})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("context_broadcasting.scale"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
    return network


def cb_scale(network):
    (measurement,) = measure(subject(network), parse_probes(["cb_scale"]))
    return measurement


@pytest.mark.parametrize(
    ("position", "units"),
    [
        ("mlp_end", ["mlp"]),
        ("mlp_mid", ["mlp"]),
        ("mlp_front", ["mlp"]),
        ("msa_end", ["msa"]),
        ("both", ["msa", "mlp"]),
    ],
)
def test_each_layer_has_the_quantiles_of_its_scales(position, units):
    network = treated(position=position)
    found = cb_scale(network)
    assert found.status == "ok", found.reason
    assert [row.name for row in found.units] == [f"blocks.{index}.{unit}" for index in range(3) for unit in units]
    scales = dict(network.named_parameters())
    ratios, means = [], []
    for row, stored in zip(found.units, found.arrays["scales"], strict=True):
        block, kind = row.name.rsplit(".", 1)
        (name,) = [n for n in scales if n.startswith(f"{block}.{'attn' if kind == 'msa' else 'mlp'}") and "broadc" in n]
        signed = scales[name].detach().double().numpy()
        ordered = np.sort(np.abs(signed))
        at = [0.1 * (len(ordered) - 1), 0.9 * (len(ordered) - 1)]
        low, high = (np.interp(place, np.arange(len(ordered)), ordered) for place in at)
        assert row.values["ratio"].value == pytest.approx(low / high)
        assert row.values["mean"].value == pytest.approx(signed.mean())
        np.testing.assert_allclose(np.sort(stored), np.sort(signed))
        ratios.append(low / high)
        means.append(signed.mean())
    assert found.scalars["ratio"].value == pytest.approx(np.mean(ratios))
    assert found.scalars["mean"].value == pytest.approx(np.mean(means))


def test_only_the_layers_that_have_it():
    assert [row.name for row in cb_scale(treated(layers=[1])).units] == ["blocks.1.mlp"]


def test_without_scales_it_does_not_apply():
    plain = treat(vit(), {"context_broadcasting": {}})
    for network in (plain, vit()):
        found = cb_scale(network)
        assert found.status == "does_not_apply"
        assert "scaled: true" in found.reason


def test_before_training_all_scales_are_0_and_there_is_no_ratio():
    found = cb_scale(treat(vit(), {"context_broadcasting": {"scaled": True}}))
    assert found.scalars["mean"].value == 0
    assert "ratio" not in found.scalars
    assert "ratio" not in found.units[0].values


def test_scales_that_are_not_finite_are_a_sentence():
    network = treated()
    with torch.no_grad():
        network.blocks[1].mlp.context_broadcasting.scale[3] = torch.nan
    patient = subject(network, dataset=noise())
    (found,) = measure(patient, parse_probes(["cb_scale"]))
    assert found.status == "failed"
    assert "not finite" in found.reason


def test_equal_scales_have_a_ratio_of_1_whatever_their_sign():
    assert quantile_ratio(np.full(8, -0.3)) == pytest.approx(1)
    assert quantile_ratio(np.linspace(-1, 1, 11)) == pytest.approx(0.2)  # of magnitudes: with signs it would be 1
    assert quantile_ratio(np.zeros(8)) is None
