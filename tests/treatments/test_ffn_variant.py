"""Table 5's feed-forward layers: each against the layer written out, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.anatomy.networks import NETWORKS, cut, shaken, tiny_vit
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.families import recognise
from vitclinic.treatments import treat

VARIANTS = ("no_norm", "relu", "conv_bn_gelu", "conv_gelu")
PRE_NORM = [
    "vit, not square, registers",
    "swin, not square, padded",
    *[name for name in NETWORKS if name.startswith("timm mixer")],
    "torchvision vit",
    "torchvision swin, padded",
]


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def double(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(NETWORKS[name]()).double().eval()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def written_out(weights: dict[str, Tensor], x: Tensor, variant: str, normalise: Any) -> Tensor:
    """norm - linear - GELU - linear, as `variant` changes it; `normalise` is the BatchNorm of its hidden layer."""
    width = x.shape[-1]
    y = x if variant == "no_norm" else F.layer_norm(x, (width,), weights["norm2.weight"], weights["norm2.bias"], 1e-6)
    y = y @ weights["mlp.fc1.weight"].T
    y = normalise(y) if variant == "conv_bn_gelu" else y + weights["mlp.fc1.bias"]
    y = F.relu(y) if variant == "relu" else F.gelu(y)
    return x + y @ weights["mlp.fc2.weight"].T + weights["mlp.fc2.bias"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("training", [False, True])
def test_a_block_is_the_variant_written_out(variant: str, training: bool) -> None:
    network = double("vit, not square, registers")
    block = network.blocks[1]
    weights = {name: value.clone() for name, value in block.state_dict().items()}
    treat(network, {"ffn_variant": {"variant": variant}}).train(training)
    x = noise(3, 27, 24)
    middle = x + block.attn(block.norm1(x))

    def normalise(y: Tensor) -> Tensor:
        norm = block.mlp.fc1.norm
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.normal_()
        if training:
            mean, variance = y.mean((0, 1)), y.var((0, 1), unbiased=False)
        else:
            mean, variance = norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
        return (y - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias

    expected = written_out(weights, middle, variant, normalise)
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*PRE_NORM, "vit, post-norm", *[n for n in NETWORKS if n.startswith("timm volo")][:1]])
def test_convolutions_of_kernel_1_compute_what_the_linear_layers_did(name: str) -> None:
    network = double(name)
    core, family = recognise(network)
    image = noise(2, *family.input_size(core))
    expected = network(image)
    treated = treat(network, {"ffn_variant": {"variant": "conv_gelu"}})
    torch.testing.assert_close(treated(image), expected, rtol=1e-10, atol=1e-10)
    mlps = [unit.module for unit in Anatomy.of(treated).of_kind("mlp")]
    assert mlps
    for mlp in mlps:
        assert not any(isinstance(part, nn.Linear) for part in mlp.modules())
        assert sum(isinstance(part, nn.Conv1d) for part in mlp.modules()) == 2


@pytest.mark.parametrize(
    ("variant", "more"),
    [("no_norm", -2 * 24), ("relu", 0), ("conv_bn_gelu", 2 * 96 - 96), ("conv_gelu", 0)],
)
def test_parameters_in_closed_form(variant: str, more: int) -> None:
    network = tiny_vit(depth=3)
    before = size(network)
    assert size(treat(network, {"ffn_variant": {"variant": variant}})) == before + 3 * more


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PRE_NORM)
def test_every_mlp_and_nothing_else_is_changed_and_the_units_stay(name: str, variant: str) -> None:
    network = double(name)
    before = Anatomy.of(network)
    others = {
        unit.name: (str(unit.module), str(unit.norm)) for unit in before.units if unit.block and unit.kind != "mlp"
    }
    treat(network, {"ffn_variant": {"variant": variant}})
    after = Anatomy.of(network)
    assert [unit.name for unit in after.units] == [unit.name for unit in before.units]
    assert {name: (str(after.unit(name).module), str(after.unit(name).norm)) for name in others} == others
    for old, new in zip(before.of_kind("mlp"), after.of_kind("mlp"), strict=True):
        if variant == "no_norm":
            assert isinstance(new.norm, nn.Identity)
            assert new.module is old.module
        else:
            assert new.norm is old.norm
            kinds = {nn.ReLU} if variant == "relu" else {nn.GELU, nn.Conv1d}
            assert kinds <= {type(part) for part in new.module.modules()}


def test_an_ablation_beside_the_conv_stem_as_in_the_table() -> None:
    network = treat(tiny_vit(), "conv_stem", "ffn_variant")
    assert network(torch.zeros(2, 3, 32, 48)).shape == (2, 5)


@pytest.mark.parametrize("variant", ["relu", "conv_gelu"])
def test_a_gated_mlp_is_a_sentence_and_left_as_it_was(variant: str) -> None:
    network = tiny_vit(mlp_layer=timm.layers.GluMlp)
    before = str(network)
    with pytest.raises(TreatmentError, match=r"blocks\.0\.mlp is a GluMlp of another kind"):
        treat(network, {"ffn_variant": {"variant": variant}})
    assert str(network) == before


def test_a_network_without_an_mlp_over_channels_is_a_sentence() -> None:
    with pytest.raises(TreatmentError, match=r"does not fit MlpMixer: it needs MLPs over .*; this network has none"):
        treat(cut("mlp_mixer", "gmlp_s16_224"), "ffn_variant")


def test_an_unknown_variant_and_a_resnet_are_sentences() -> None:
    with pytest.raises(RecipeError, match=r"ffn_variant\.variant.*'no_norm', 'relu', 'conv_bn_gelu' or 'conv_gelu'"):
        treat(tiny_vit(), {"ffn_variant": {"variant": "gelu"}})
    with pytest.raises(TreatmentError, match="ffn_variant does not fit ResNet: it needs MLPs over channels"):
        treat(cut("resnet", "resnet18"), "ffn_variant")


@pytest.mark.parametrize("act", [timm.layers.GELUTanh, timm.layers.activations.QuickGELU, nn.GELU])
@pytest.mark.parametrize("variant", ["conv_gelu", "conv_bn_gelu"])
def test_a_gelu_of_another_kind_stays(variant: str, act: type[nn.Module]) -> None:
    network = treat(tiny_vit(act_layer=act), {"ffn_variant": {"variant": variant}})
    assert [type(block.mlp.act) for block in network.blocks] == [act, act]


def test_another_activation_becomes_the_gelu_of_the_table() -> None:
    network = treat(tiny_vit(act_layer=nn.SiLU), {"ffn_variant": {"variant": "conv_gelu"}})
    assert [type(block.mlp.act) for block in network.blocks] == [nn.GELU, nn.GELU]


@pytest.mark.parametrize("variant", ["conv_gelu", "conv_bn_gelu"])
def test_relu_activation_is_not_undone(variant: str) -> None:
    network = treat(tiny_vit(), "relu_activation")
    before = str(network)
    with pytest.raises(TreatmentError, match=r"list ffn_variant before relu_activation, whose ReLUs it would"):
        treat(network, {"ffn_variant": {"variant": variant}})
    assert str(network) == before
    other = treat(tiny_vit(), {"ffn_variant": {"variant": variant}}, "relu_activation")
    assert [type(block.mlp.act) for block in other.blocks] == [nn.ReLU, nn.ReLU]


def test_relu_where_there_is_nothing_but_relu_is_a_sentence() -> None:
    for network in (treat(tiny_vit(), "relu_activation"), tiny_vit(act_layer=nn.ReLU)):
        with pytest.raises(TreatmentError, match=r"every MLP of this network has ReLU already\.$"):
            treat(network, {"ffn_variant": {"variant": "relu"}})
    assert treat(treat(tiny_vit(), "relu_activation"), {"ffn_variant": {"variant": "no_norm"}})


def test_what_is_frozen_stays_frozen() -> None:
    network = treat(tiny_vit().requires_grad_(False), {"ffn_variant": {"variant": "conv_gelu"}})
    assert not any(parameter.requires_grad for parameter in network.parameters())
