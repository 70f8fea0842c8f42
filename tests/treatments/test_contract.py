"""What holds for every treatment, on a small network of every family that it claims, and of every one that it does not.

A new treatment is tested here without a new test; settings other than the defaults that are worth it go into SETTINGS.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, shaken
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.families import list_families, recognise
from vitclinic.treatments import Treatment, known_treatments, parse_treatments, treat, treatments_of

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "conv_stem": [{"components": "1Proj+1BN+1ReLU"}, {"components": "3Conv+1Proj+1ReLU", "act": "gelu", "hidden": 8}],
    "ffn_variant": [{"variant": "no_norm"}, {"variant": "relu"}, {"variant": "conv_gelu"}],
    "context_broadcasting": [
        {"scaled": True, "position": "mlp_mid", "layers": [0]},
        {"position": "mlp_front", "layers": "all"},
    ],
    "uniform_heads": [{"variant": "adjust"}],
    "squeeze_excitation": [{"position": "mlp_mid", "layers": "all", "reduction": 4}],
    "extra_block": [{"kind": "mlp"}],
    "local_attention": [{"kernel": 5}, {"kernel": "global"}],
}
"""Further settings of a treatment to hold it to the contract with."""

ONE_EACH = {
    "timm ViT": ["vit, not square, registers", "vit, no class token", "vit, post-norm", "vit, normalised"],
    "timm PiT": [name for name in NETWORKS if name.startswith("timm pit")],
    "timm Swin": ["swin, not square, padded"],
    "timm Swin V2": [name for name in NETWORKS if name.startswith("timm swinv2")][:1],
    "timm MLP-Mixer": [name for name in NETWORKS if name.startswith("timm mixer")],
    "timm ResNet": [name for name in NETWORKS if name.startswith("timm resnet")][:2],
    "timm ConvNeXt": [name for name in NETWORKS if name.startswith("timm convnext")][:1],
    "timm VOLO": [name for name in NETWORKS if name.startswith("timm volo")][:1],
    "torchvision ViT": ["torchvision vit"],
    "torchvision Swin": ["torchvision swin, padded"],
    "torchvision ResNet": ["torchvision resnet"],
    "torchvision ConvNeXt": ["torchvision convnext"],
    "Hugging Face ViT": ["huggingface vit"],
    "Hugging Face DeiT": ["huggingface deit"],
    "Hugging Face Swin": ["huggingface swin"],
    "vitclinic pre-activation ResNet": ["vitclinic preact_resnet", "vitclinic preact_resnet, basic, cifar"],
    "vitclinic AlterNet": ["vitclinic alternet, padded", "vitclinic alternet, cifar"],
}
"""Small networks by family."""

SURGICAL = [name for name, treatment in known_treatments().items() if treatment.operate is not Treatment.operate]


def claims() -> list[tuple[str, int, str]]:
    """(treatment, which of its settings, network) for every family that it claims."""
    found = []
    for name in SURGICAL:
        families = known_treatments()[name].families
        for family, networks in ONE_EACH.items():
            if families is None or family in families:
                variants = range(1 + len(SETTINGS.get(name, [])))
                found += [(name, variant, network) for variant in variants for network in networks]
    return [claim for claim in found if claim[2] in NETWORKS]


def entry(name: str, variant: int) -> dict[str, Any]:
    return {name: [{}, *SETTINGS.get(name, [])][variant]}


def build(network: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(NETWORKS[network]()).eval()


def images(network: nn.Module) -> Tensor:
    core, family = recognise(network)
    return torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1))


def logits(network: nn.Module, x: Tensor) -> Tensor:
    output = network(x)
    return output if isinstance(output, Tensor) else output.logits


def test_every_family_has_a_network_here() -> None:
    libraries = ("timm", "torchvision", "vitclinic")
    names = {family.name for family in list_families() if family.name.partition(" ")[0] in libraries}
    assert names <= set(ONE_EACH)


@pytest.mark.parametrize("name", known_treatments())
def test_the_facts_that_the_listing_shows_are_there(name: str) -> None:
    treatment = known_treatments()[name]
    assert treatment.paper
    assert treatment.changes
    assert treatment.costs
    assert treatment.families is None or set(treatment.families) <= {family.name for family in list_families()}


@pytest.mark.parametrize("name", known_treatments())
def test_every_treatment_works_with_its_defaults_and_comes_back_from_plain_data(name: str) -> None:
    (treatment,) = parse_treatments([name])
    assert parse_treatments([{name: treatment.model_dump(mode="json")}]) == [treatment]


@pytest.mark.parametrize(("name", "variant", "network"), claims())
def test_a_treated_network_learns_and_comes_back(name: str, variant: int, network: str) -> None:
    untreated = build(network)
    x = images(untreated)
    with torch.no_grad():
        shape = logits(untreated, x).shape
    idle = {key for key, p in untreated.named_parameters() if not p.requires_grad}
    treated = treat(untreated, entry(name, variant))
    assert treatments_of(treated) == (name,)

    treated.train()
    output = logits(treated, x)
    assert output.shape == shape
    assert output.isfinite().all()
    output.square().sum().backward()
    without = {key for key, p in treated.named_parameters() if p.requires_grad and p.grad is None}
    assert without <= idle | _without_gradient(network), "parameters that DDP would wait for"
    assert all(p.grad.isfinite().all() for p in treated.parameters() if p.grad is not None)

    torch.manual_seed(7)
    again = treat(NETWORKS[network](), entry(name, variant))
    again.load_state_dict(treated.state_dict())
    with torch.no_grad():
        assert torch.equal(logits(again.eval(), x), logits(treated.eval(), x))
        assert torch.equal(logits(copy.deepcopy(treated), x), logits(treated, x))


def _without_gradient(network: str) -> set[str]:
    """The parameters that the network does not use, treated or not."""
    untreated = build(network).train()
    logits(untreated, images(untreated)).square().sum().backward()
    return {key for key, p in untreated.named_parameters() if p.grad is None}


@pytest.mark.parametrize(("name", "variant", "network"), claims())
def test_a_treated_network_still_has_an_anatomy(name: str, variant: int, network: str) -> None:
    treated = treat(build(network), entry(name, variant))
    kinds = [unit.kind for unit in Anatomy.of(treated).units]
    assert kinds[0] == "stem"
    assert kinds[-1] == "head"


@pytest.mark.parametrize(("name", "network"), [(name, network) for name, variant, network in claims() if variant == 0])
def test_treating_twice_is_an_error(name: str, network: str) -> None:
    treated = treat(build(network), name)
    with pytest.raises(TreatmentError, match=f"already been treated with {name}"):
        treat(treated, name)


@pytest.mark.parametrize("name", SURGICAL)
def test_a_network_that_it_does_not_fit_is_left_as_it_was(name: str) -> None:
    claimed = known_treatments()[name].families
    for family, networks in ONE_EACH.items():
        if claimed is None or family in claimed or networks[0] not in NETWORKS:
            continue
        network = build(networks[0])
        before = str(network)
        with pytest.raises(TreatmentError, match=rf"^{name} does not fit a {family}; it fits .*\.$"):
            treat(network, name)
        assert str(network) == before
        assert treatments_of(network) == ()


@pytest.mark.parametrize("name", SURGICAL)
def test_a_network_of_no_known_family_is_a_sentence(name: str) -> None:
    if known_treatments()[name].families is None:
        return
    with pytest.raises(TreatmentError, match="no known family"):
        treat(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), name)
