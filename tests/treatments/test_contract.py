"""What holds for every treatment, on a small network of every family that has its part, and of every one that has not.

A new treatment gets a line in FITS; settings other than the defaults that are worth it go into SETTINGS.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, shaken
from tests.treatments.handwritten import EncoderViT, OwnViT, families_of_handwritten_networks
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.families import list_families, recognise
from vitclinic.data import ImageSpec
from vitclinic.treatments import Treatment, known_treatments, parse_treatments, treat, treatments_of

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "conv_stem": [
        {"components": "1Proj+1BN+1ReLU"},
        {"components": "3Conv+1Proj+1ReLU", "act": "gelu", "hidden": 8},
        {"preset": "residual", "hidden": 8},
    ],
    "ffn_variant": [{"variant": "no_norm"}, {"variant": "relu"}, {"variant": "conv_gelu"}],
    "context_broadcasting": [
        {"scaled": True, "position": "mlp_mid", "layers": [0]},
        {"position": "mlp_front", "layers": "all"},
    ],
    "uniform_heads": [{"variant": "adjust"}],
    "squeeze_excitation": [{"position": "mlp_mid", "layers": "all", "reduction": 4}],
    "extra_block": [{"kind": "mlp"}],
    "local_attention": [{"kernel": 5}, {"kernel": "global"}],
    "mimetic_init": [{"kind": "convolution", "positions": "sinusoidal"}],
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

HANDWRITTEN = {"own ViT": OwnViT, "own ViT of encoder layers": EncoderViT}
"""Networks of no library, small."""
BUILDERS = {**NETWORKS, **HANDWRITTEN}

HUGGING_FACE = ("Hugging Face ViT", "Hugging Face DeiT", "Hugging Face Swin")
ATTENTIVE = (
    *("timm ViT", "timm PiT", "timm Swin", "timm Swin V2", "timm VOLO", "torchvision ViT", "torchvision Swin"),
    *(*HUGGING_FACE, "handwritten"),
)
PLAIN = ("timm ViT", "torchvision ViT", "Hugging Face ViT", "Hugging Face DeiT")
TOKENS = (*ATTENTIVE, "timm MLP-Mixer")
FITS: dict[str, tuple[str, ...]] = {
    "context_broadcasting": TOKENS,
    "conv_stem": (*TOKENS, "timm ConvNeXt", "torchvision ConvNeXt"),
    "extra_block": ATTENTIVE,
    "ffn_variant": TOKENS,
    "gap_head": (*PLAIN, "timm PiT", "timm VOLO", "handwritten"),
    "local_attention": (*ATTENTIVE, "vitclinic AlterNet"),
    "mimetic_init": ATTENTIVE,
    "no_softmax": ATTENTIVE,
    "patch_dropout": (*PLAIN, "handwritten"),
    "registers": (*PLAIN, "handwritten"),
    "relu_activation": (*TOKENS, "timm ConvNeXt", "torchvision ConvNeXt"),
    "sequence_pooling": (
        *(*PLAIN, "timm PiT", "timm VOLO", "handwritten", "timm Swin", "timm Swin V2", "timm MLP-Mixer"),
        *("torchvision Swin", "Hugging Face Swin"),
    ),
    "spatial_smoothing": (
        *("timm ResNet", "torchvision ResNet", "timm ConvNeXt", "torchvision ConvNeXt"),
        *("vitclinic pre-activation ResNet", "vitclinic AlterNet"),
    ),
    "squeeze_excitation": TOKENS,
    "talking_heads": (*ATTENTIVE, "vitclinic AlterNet"),
    "uniform_heads": ATTENTIVE,
}
"""The families that have the part that a treatment changes; all others have not."""
ONLY: dict[tuple[str, int], tuple[str, ...]] = {
    ("uniform_heads", 1): ("timm ViT", "timm PiT"),
    ("mimetic_init", 1): (*PLAIN, "handwritten"),
    ("conv_stem", 3): tuple(family for family in FITS["conv_stem"] if family != "timm PiT"),
}
"""Where some settings of a treatment fit less."""
SOMETIMES = {("relu_activation", "vitclinic AlterNet"), ("no_softmax", "vitclinic AlterNet")}
"""Fits that depend on how a network of the family was built, or on weights that do not overflow without a softmax."""

SURGICAL = [name for name, treatment in known_treatments().items() if treatment.operate is not Treatment.operate]


@pytest.fixture(autouse=True)
def handwritten() -> Iterator[None]:
    with families_of_handwritten_networks():
        yield


QUICK = {
    *("vit, not square, registers", "swin, not square, padded", "torchvision vit", "huggingface vit", "own ViT"),
    *(ONE_EACH["timm PiT"][:1] + ONE_EACH["timm MLP-Mixer"][:1] + ONE_EACH["timm ResNet"][:1]),
    *("torchvision convnext", "vitclinic alternet, cifar"),
}
PLAINEST = {"vit, not square, registers", "huggingface vit", "own ViT"}
"""One network of each kind and library, and those for further settings; the others are slow tests."""


def claims() -> list[tuple[str, int, str]]:
    """(treatment, which of its settings, network) for every family that it fits."""
    found = []
    for name in SURGICAL:
        for family, networks in {**ONE_EACH, "handwritten": list(HANDWRITTEN)}.items():
            if family in FITS[name]:
                fitting = [v for v in range(1 + len(SETTINGS.get(name, []))) if family in ONLY.get((name, v), [family])]
                found += [(name, variant, network) for variant in fitting for network in networks]
    return [claim for claim in found if claim[2] in BUILDERS]


def marked(*found: tuple[Any, ...]) -> list[Any]:
    """Claims as parameters of a test: (treatment, network), or (treatment, setting, network)."""
    quick = [one[-1] in (PLAINEST if one[1:-1] > (0,) else QUICK) for one in found]
    return [pytest.param(*one, marks=[] if now else [pytest.mark.slow]) for one, now in zip(found, quick, strict=True)]


def entry(name: str, variant: int) -> dict[str, Any]:
    return {name: [{}, *SETTINGS.get(name, [])][variant]}


def build(network: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(BUILDERS[network]()).eval()


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
    assert treatment.part or treatment.name in ("sam", "adversarial")


@pytest.mark.parametrize("name", known_treatments())
def test_every_treatment_works_with_its_defaults_and_comes_back_from_plain_data(name: str) -> None:
    (treatment,) = parse_treatments([name])
    assert parse_treatments([{name: treatment.model_dump(mode="json")}]) == [treatment]


@pytest.mark.parametrize(("name", "variant", "network"), marked(*claims()))
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
    again = treat(BUILDERS[network](), entry(name, variant))
    again.load_state_dict(treated.state_dict())
    with torch.no_grad():
        assert torch.equal(logits(again.eval(), x), logits(treated.eval(), x))
        assert torch.equal(logits(copy.deepcopy(treated), x), logits(treated, x))


def _without_gradient(network: str) -> set[str]:
    """The parameters that the network does not use, treated or not."""
    untreated = build(network).train()
    logits(untreated, images(untreated)).square().sum().backward()
    return {key for key, p in untreated.named_parameters() if p.grad is None}


REPLACED = {
    "conv_stem": r"patch_embed|stem|conv_proj|features\.0|patches|patch_embeddings",
    "ffn_variant": r"norm|ln_2|mlp|up|down|linear[12]|fc[12]",
    "gap_head": r"cls_token|dist_token|head_dist|norm",
    "sequence_pooling": r"cls_token|dist_token|head_dist|norm",
}
"""The weights that a treatment is there to replace or to remove."""


@pytest.mark.parametrize(("name", "variant", "network"), marked(*claims()))
def test_a_treated_network_keeps_its_anatomy_and_the_names_of_its_weights(
    name: str, variant: int, network: str
) -> None:
    untreated = build(network)
    before = {key for key, _ in untreated.named_parameters()}
    treated = treat(untreated, entry(name, variant))
    kinds = [unit.kind for unit in Anatomy.of(treated).units]
    assert kinds[0] == "stem"
    assert kinds[-1] == "head"
    after = {key for key, _ in treated.named_parameters()}
    assert not {key for key in before - after if not re.search(REPLACED.get(name, "^$"), key)}
    if variant == 0:
        with pytest.raises(TreatmentError, match=f"already been treated with {name}"):
            treat(treated, name)


@pytest.mark.parametrize("name", SURGICAL)
def test_a_network_without_the_part_is_told_which_and_left_as_it_was(name: str) -> None:
    for family, networks in ONE_EACH.items():
        if family in FITS[name] or (name, family) in SOMETIMES or networks[0] not in NETWORKS:
            continue
        network = build(networks[0])
        before = str(network)
        kind, part = type(network).__name__, re.escape(known_treatments()[name].part)
        sentence = rf"^{name} does not fit ({kind}: it needs {part}; .*|\w+\.\d\.msa: its only head .*)\.$"
        with pytest.raises(TreatmentError, match=sentence):
            treat(network, name)
        assert str(network) == before
        assert treatments_of(network) == ()


@pytest.mark.parametrize("name", SURGICAL)
def test_a_network_that_does_not_say_which_images_it_takes_is_asked_for_them(name: str) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(TreatmentError, match=r"^Sequential does not say which images it takes: give its spec"):
        treat(network, name)
    with pytest.raises(TreatmentError, match=rf"^{name} does not fit Sequential: it needs .*\.$"):
        treat(network, name, spec=ImageSpec(3, 3, (2, 2)))


NEUTRAL: dict[str, dict[str, Any]] = {
    "context_broadcasting": {"scaled": True},
    "local_attention": {"kernel": 31},
    "talking_heads": {},
    "ffn_variant": {"variant": "conv_gelu"},
}
"""Settings that leave the network's outputs as they were."""


@pytest.mark.parametrize(
    ("name", "network"), marked(*((name, network) for name, v, network in claims() if name in NEUTRAL and v == 0))
)
def test_a_neutral_setting_changes_nothing(name: str, network: str) -> None:
    untreated = build(network)
    x = images(untreated)
    with torch.no_grad():
        before = logits(untreated, x)
        after = logits(treat(untreated, {name: NEUTRAL[name]}), x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())


@pytest.mark.parametrize(("name", "network"), marked(*((name, network) for name, v, network in claims() if v == 0)))
def test_two_steps_of_training_move_the_weights(name: str, network: str) -> None:
    treated = treat(build(network), name).train()
    x = images(treated)
    optimizer = torch.optim.AdamW(treated.parameters(), lr=1e-3)
    before = {key: p.detach().clone() for key, p in treated.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits(treated, x), torch.tensor([0, 1])).backward()
        optimizer.step()
    moved = {key for key, p in treated.named_parameters() if not torch.equal(p, before[key])}
    assert all(p.isfinite().all() for p in treated.parameters())
    assert moved >= {key for key in before if "mix" in key or "context_broadcasting" in key or "squeeze" in key}
    assert len(moved) > len(before) / 2


@pytest.mark.parametrize("name", [name for name in FITS if name != "spatial_smoothing"])
def test_it_fits_ten_families_of_three_libraries_and_two_handwritten_networks(name: str) -> None:
    libraries = {family.partition(" ")[0] for family in FITS[name]} - {"handwritten", "vitclinic"}
    assert libraries == {"timm", "torchvision", "Hugging"}
    assert "handwritten" in FITS[name]
    # Few families have a class token, or one sequence of tokens of any length.
    assert len(FITS[name]) - 1 >= {"gap_head": 5, "registers": 4, "patch_dropout": 4}.get(name, 10)
