"""Norms against a direct computation in float64 that stores everything."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests.probes.subjects import subject
from vitclinic.anatomy import Anatomy, taps
from vitclinic.probes import measure, parameters_by_unit, parse_probes


def norms(patient):
    (measurement,) = measure(patient, parse_probes(["norms"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer", "torchvision vit"])
def test_activation_norms(name):
    patient = subject(name)
    found = norms(patient)
    network = patient.network.double().eval()
    images = torch.cat([batch.images for batch in patient.batches()]).double()
    units = Anatomy.of(network, images).units
    with torch.no_grad(), taps({unit.name: unit.output for unit in units}) as seen:
        network(images)
    assert [row.name for row in found.units] == [unit.name for unit in units]
    for row in found.units:
        each = np.array([np.sqrt((image.numpy() ** 2).sum()) for image in seen[row.name]])
        low, high = stats.t.interval(0.95, len(each) - 1, each.mean(), stats.sem(each))
        scalar = row.values["activation_norm"]
        assert (scalar.value, scalar.low, scalar.high) == pytest.approx((each.mean(), low, high), rel=1e-5)
        assert scalar.n == 22


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer", "torchvision vit"])
def test_weight_norms_add_up(name):
    patient = subject(name)
    found = norms(patient)
    whole = np.concatenate([p.detach().double().numpy().ravel() for p in patient.network.parameters()])
    assert found.scalars["weight_norm"].value == pytest.approx(np.linalg.norm(whole), rel=1e-12)
    parts = [row.values["weight_norm"].value for row in found.units]
    parts.append(found.scalars["weight_norm_outside_units"].value)
    assert math.hypot(*parts) == pytest.approx(np.linalg.norm(whole), rel=1e-12)


def test_a_unit_of_a_vit_has_its_norm_and_its_embedding():
    patient = subject("vit")
    named = {id(p): name for name, p in patient.network.backbone.named_parameters()}
    owned = {unit: {named[id(p)] for p in ps} for unit, ps in parameters_by_unit(patient.anatomy).items()}
    assert owned["position"] == {"pos_embed"}
    assert owned["stem"] == {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert {"blocks.0.norm1.weight", "blocks.0.attn.qkv.weight"} <= owned["blocks.0.msa"]
    assert owned["head"] == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert set(named.values()) - set().union(*owned.values()) == {"cls_token"}


def test_the_blocks_of_table_4():
    found = norms(subject("vit"))  # three blocks
    after = {row.name: row.values["activation_norm"] for row in found.units}
    for place, block in [("first", 0), ("middle", 1), ("last", 2)]:
        assert found.scalars[f"activation_norm_{place}"] == after[f"blocks.{block}.mlp"]


def test_doubling_the_stem_doubles_its_norms():
    patient, doubled = subject("resnet"), subject("resnet")
    with torch.no_grad():
        doubled.network.bn1.weight.mul_(2)
        doubled.network.bn1.bias.mul_(2)
    ours, theirs = norms(patient).units[0], norms(doubled).units[0]
    assert theirs.values["activation_norm"].value == pytest.approx(2 * ours.values["activation_norm"].value)


def test_one_image_has_a_norm_and_no_interval():
    found = norms(subject(limit=1))
    scalar = found.units[0].values["activation_norm"]
    assert (scalar.n, scalar.low, scalar.high) == (1, None, None)
    assert scalar.value > 0


def test_a_network_with_nan_weights_says_so():
    patient = subject("vit")
    with torch.no_grad():
        patient.network.backbone.blocks[1].mlp.fc1.weight[0, 0] = math.nan
    (measurement,) = measure(patient, parse_probes(["norms"]))
    assert measurement.status == "failed"
    assert "blocks.1.mlp" in measurement.reason
    assert "not finite" in measurement.reason
