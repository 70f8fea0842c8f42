"""Active neurons against counting by hand, on every family."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from tests.anatomy.networks import NETWORKS, shaken
from tests.anatomy.zoo import ZOO
from tests.probes.subjects import subject, vit
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, taps
from vitclinic.anatomy.families import recognise
from vitclinic.probes import load_subject, measure, parse_probes
from vitclinic.probes.features.sparsity import active_share


def measured(patient):
    (measurement,) = measure(patient, parse_probes(["sparsity"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def test_a_vit_against_its_own_layers():
    patient = subject("vit")
    found = measured(patient)
    network = patient.network.double().eval()
    images = torch.cat([batch.images for batch in patient.batches()]).double()
    shares = []
    with torch.no_grad():
        x = network.backbone._pos_embed(network.backbone.patch_embed((images - network.mean) / network.std))
        for block in network.backbone.blocks:
            x = x + block.attn(block.norm1(x))
            hidden = torch.nn.functional.gelu(block.mlp.fc1(block.norm2(x)))
            shares.append([(image > 0).double().mean().item() for image in hidden])
            x = x + block.mlp.fc2(hidden)
    assert [row.name for row in found.units] == [f"blocks.{index}.mlp" for index in range(3)]
    for row, each in zip(found.units, shares, strict=True):
        low, high = stats.t.interval(0.95, 21, np.mean(each), stats.sem(each))
        scalar = row.values["active"]
        assert (scalar.value, scalar.low, scalar.high) == pytest.approx((np.mean(each), low, high), rel=1e-4)
        assert scalar.n == 22
    assert found.scalars["active"].value == pytest.approx(np.mean(shares), rel=1e-4)
    assert found.scalars["active_first"] == found.units[0].values["active"]
    assert found.scalars["active_last"] == found.units[-1].values["active"]


def test_bias_decides_when_weights_are_zero():
    network = vit(depth=2)
    with torch.no_grad():
        for at, active in ((0, 30), (1, 0)):  # of 96 hidden neurons
            layer = network.blocks[at].mlp.fc1
            layer.weight.zero_()
            layer.bias.copy_(torch.where(torch.arange(96) < active, 1.0, -1.0))
    found = measured(subject(network))
    assert [row.values["active"].value for row in found.units] == pytest.approx([30 / 96, 0])


def test_the_batch_size_does_not_matter():
    ours, theirs = measured(subject("mixer", batch_size=8)), measured(subject("mixer", batch_size=3))
    for a, b in zip(ours.units, theirs.units, strict=True):
        assert a.values["active"].value == pytest.approx(b.values["active"].value, rel=1e-6)


def test_no_activation_function_does_not_apply():
    network = vit()
    for block in network.blocks:
        block.mlp = nn.Linear(24, 24)
    (measurement,) = measure(subject(network), parse_probes(["sparsity"]))
    assert measurement.status == "does_not_apply"
    assert "activation function" in measurement.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zero_and_minus_zero_are_not_active(dtype):
    values = torch.tensor([[0.0, -0.0, 1e-30, -1.0, 2.0]], dtype=dtype)
    assert active_share(values).item() == pytest.approx(0.4)


@pytest.fixture(params=NETWORKS, scope="module")
def network(request):
    torch.manual_seed(0)
    return shaken(NETWORKS[request.param]()).eval()


def test_every_family_shows_the_input_of_the_last_layer_of_its_branches(network):
    """What leads into the last linear layer or conv of a unit is its activation, but for norms and gates between."""
    try:
        anatomy = Anatomy.of(network)
    except AnatomyError:
        pytest.skip("no anatomy")
    units = [unit for unit in anatomy.units if unit.kind in ("mlp", "conv", "token_mlp")]
    silent = [unit for unit in units if unit.activation is None]
    assert all(isinstance(unit.module, nn.Linear) for unit in silent), silent  # ResMLP mixes tokens linearly
    assert not any(unit.activation for unit in anatomy.units if unit not in units)
    core, family = recognise(network)
    images = torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1))
    sites = {unit.name: unit.activation for unit in units if unit.activation is not None}
    last: dict[str, torch.Tensor] = {}
    handles = [_last_layer(unit).register_forward_pre_hook(_keep(last, unit.name)) for unit in units]
    with torch.no_grad(), taps(sites) as seen:
        core(images)
    for handle in handles:
        handle.remove()
    for unit in units:
        if unit.name in sites and not _something_between(unit.module):
            assert torch.equal(seen[unit.name].flatten(), last[unit.name].flatten()), unit


def _layers(unit):
    owner = unit.module
    inside = [m for name, m in owner.named_modules() if "downsample" not in name and "se." not in f"{name}."]
    return [module for module in inside if isinstance(module, nn.Linear | nn.Conv2d)]


def _last_layer(unit):
    return _layers(unit)[-1]


def _something_between(module):
    """Gates, norms and blurs between the activation and the last layer."""
    names = {type(part).__name__ for part in module.modules()}
    return bool(names & {"SwiGLU", "GluMlp", "GatedMlp", "GlobalResponseNormMlp", "BlurPool2d"}) or any(
        not isinstance(part.norm, nn.Identity) for part in module.modules() if type(part).__name__ == "Mlp"
    )


def _keep(kept, name):
    def hook(_, args):
        kept[name] = args[0].detach().clone()

    return hook


def test_neurons_of_a_network_with_tokens_first_are_those_of_images():
    network = ZOO["hand-written/sequence_first_vit"].awake().eval()
    count = 12
    images = torch.rand(count, *ZOO["hand-written/sequence_first_vit"].image)
    hidden = {}
    gelus = [module for module in network.modules() if isinstance(module, nn.GELU)]
    handles = [gelu.register_forward_hook(lambda m, _, out: hidden.update({m: out})) for gelu in gelus]
    with torch.no_grad():
        network(images)
    for handle in handles:
        handle.remove()
    (found,) = measure(load_subject(network, [(images, torch.arange(count) % 3)]), parse_probes(["sparsity"]))
    assert found.status == "ok", found.reason
    assert len(found.units) == len(gelus)
    for row, gelu in zip(found.units, gelus, strict=True):
        tokens_first = hidden[gelu]
        shares = [(tokens_first[:, image] > 0).double().mean().item() for image in range(count)]
        low, high = stats.t.interval(0.95, count - 1, np.mean(shares), stats.sem(shares))
        scalar = row.values["active"]
        assert (scalar.value, scalar.low, scalar.high) == pytest.approx((np.mean(shares), low, high), rel=1e-4)
