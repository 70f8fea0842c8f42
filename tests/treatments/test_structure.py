"""Treatments of networks of no known family, and of known ones read by observation: they fit what has the part."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.anatomy.token_orders import CLASSES, HEADS, SIDE, WIDTH, OrderedViT
from tests.anatomy.zoo import ZOO
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy import anatomy as anatomy_module
from vitclinic.anatomy.wrappers import unwrap
from vitclinic.data import ImageSpec
from vitclinic.treatments import PatchDiversity, image_spec, known_treatments, treat, treatments_of

NETWORKS = (
    "timm/vit_tiny_patch16_224",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/beit_base_patch16_224",
    "timm/eva02_tiny_patch14_224",
    "timm/cait_xxs24_224",
    "timm/xcit_nano_12_p16_224",
    "timm/vit_relpos_small_patch16_224",
    "timm/swin_tiny_patch4_window7_224",
    "timm/pit_ti_224",
    "timm/mixer_s16_224",
    "transformers/ViTForImageClassification",
    "transformers/Dinov2ForImageClassification",
    "transformers/CLIPVisionModel",
    "transformers/SiglipForImageClassification",
    "transformers/BeitForImageClassification",
    "transformers/Swinv2ForImageClassification",
    "torchvision/vit",
    "torchvision/swin",
    "hand-written/linear_patch_vit",
    "hand-written/encoder_vit",
    "hand-written/sequence_first_vit",
    "hand-written/normalize_then_vit",
    "hand-written/backbone_with_head",
    "hand-written/functional_vit",
    "hand-written/shared_block_vit",
)
FAST = ("timm/beit_base_patch16_224", "hand-written/linear_patch_vit", "hand-written/sequence_first_vit")
"""The networks of every run; the others are slow tests."""

OF_SEQUENCES: dict[str, tuple[str, ...]] = {
    "gap_head": (
        "timm/deit3_small_patch16_224",
        *("transformers/DeiTForImageClassification", "transformers/ViTMSNForImageClassification"),
        *("transformers/BlipVisionModel", "transformers/DINOv3ViTModel"),
    ),
    "registers": (
        *("timm/eva_giant_patch14_224", "timm/naflexvit_base_patch16_gap", "timm/vit_small_patch14_reg4_dinov2"),
        *("transformers/DeiTForImageClassification", "transformers/IJepaForImageClassification"),
        *("transformers/Aimv2VisionModel", "transformers/DINOv3ViTModel"),
    ),
    "patch_dropout": (
        *("timm/vit_small_patch14_reg4_dinov2", "timm/deit3_small_patch16_224", "timm/vit_base_patch16_siglip_256"),
        *("transformers/DeiTForImageClassification", "transformers/IJepaForImageClassification"),
        *("transformers/ViTMSNForImageClassification", "transformers/Aimv2VisionModel"),
    ),
}
"""Further networks for treatments that few of the others have the part for."""
QUICK = ("transformers/ViTForImageClassification", "transformers/Dinov2ForImageClassification", "torchvision/vit")
"""Networks of every run for these treatments, beside their own and the fast ones."""

SURGERY: dict[str, dict[str, Any]] = {
    "context_broadcasting": {"scaled": True, "initial_scale": 0.5},
    "squeeze_excitation": {"reduction": 4},  # of three hidden units, all may be idle
    "extra_block": {},
    "talking_heads": {},
    "uniform_heads": {},
    "no_softmax": {},
    "local_attention": {"kernel": 3},
    "gap_head": {},
    "conv_stem": {"hidden": 8},
    "relu_activation": {},
    "ffn_variant": {},
    "registers": {},
    "patch_dropout": {},
    "mimetic_init": {},
    "sequence_pooling": {},
}
OF_ATTENTION = ("talking_heads", "uniform_heads", "no_softmax", "local_attention", "mimetic_init")
NO_ATTENTION = dict.fromkeys(OF_ATTENTION, "this network has none")
NO_CLASS_TOKEN = {"gap_head": "this one has no class token"}
NO_MEAN = {"sequence_pooling": "this one has no class token"}
CLASS_ATTENTION = {"mimetic_init": "only its class token attends to the grid"}
WINDOWS = dict.fromkeys(("registers", "patch_dropout"), r"\w mixes a fixed number of tokens")
NO_SEQUENCE = dict.fromkeys(("registers", "patch_dropout"), "has none")
PLACES = {"patch_dropout": "know a patch by its place in the sequence"}
TWO_MAPS = dict.fromkeys(OF_ATTENTION, "which computes 2 maps")
REFUSALS: dict[str, dict[str, str]] = {
    "timm/beit_base_patch16_224": PLACES
    | {"gap_head": "does not read its class token", "registers": "with more tokens"},
    "timm/eva02_tiny_patch14_224": PLACES
    | {
        "gap_head": "does not read its class token",
        "relu_activation": "calls none",
        "ffn_variant": "is a GluMlp of another kind",
        "registers": "with more tokens",
    },
    "timm/cait_xxs24_224": NO_CLASS_TOKEN | NO_MEAN | CLASS_ATTENTION | {"patch_dropout": "has none"},
    "timm/xcit_nano_12_p16_224": WINDOWS
    | CLASS_ATTENTION
    | {
        "conv_stem": r"patch_embed\.proj\.0\.0 has kernel \(3, 3\)",
        "local_attention": "only its class token attends to the grid",
    },
    "timm/vit_relpos_small_patch16_224": NO_CLASS_TOKEN | NO_SEQUENCE | {"registers": "with more tokens"},
    "timm/swin_tiny_patch4_window7_224": NO_CLASS_TOKEN | WINDOWS | {"uniform_heads": "its only head"},
    "timm/pit_ti_224": NO_SEQUENCE | {"registers": "mixes a fixed number of tokens"},
    "timm/mixer_s16_224": NO_ATTENTION | NO_CLASS_TOKEN | WINDOWS | {"extra_block": "it has no attention"},
    "transformers/SiglipForImageClassification": NO_CLASS_TOKEN,
    "transformers/BeitForImageClassification": {"gap_head": "does not read its class token"},
    "transformers/Swinv2ForImageClassification": NO_CLASS_TOKEN | WINDOWS,
    "torchvision/swin": NO_CLASS_TOKEN | WINDOWS,
    "hand-written/linear_patch_vit": {"conv_stem": "the image first meets to_patch_embedding.1, a Linear"},
    "hand-written/encoder_vit": NO_CLASS_TOKEN,
    "hand-written/functional_vit": TWO_MAPS
    | NO_CLASS_TOKEN
    | NO_MEAN
    | {"patch_dropout": "has none", "conv_stem": "has none", "ffn_variant": "mlp.0 is part of a FunctionalViT"},
    "hand-written/shared_block_vit": NO_CLASS_TOKEN | NO_SEQUENCE,
}
"""What a network has not, by treatment: the refusal says so."""

REPLACED = {
    "conv_stem": r"conv1|embed|proj|patch|stem|features\.0|conv_proj",
    "ffn_variant": r"fc[12]|mlp|net|linear[12]|dense|norm|ff|feed|up|down",
    "gap_head": r"cls_token|dist_token|head_dist|norm",
    "sequence_pooling": r"cls_token|dist_token|head_dist|norm",
}
"""The weights that a treatment is there to replace or to remove."""

MATRIX = [
    pytest.param(network, marks=[] if network in FAST else [pytest.mark.slow], id=network) for network in NETWORKS
]
PAIRS = [
    pytest.param(
        treatment,
        network,
        marks=[] if network in (*FAST, *further, *(QUICK if further else ())) else [pytest.mark.slow],
        id=f"{treatment}-{network}",
    )
    for treatment in SURGERY
    for further in [OF_SEQUENCES.get(treatment, ())]
    for network in (*NETWORKS, *further)
]


def answer(network: nn.Module, images: Tensor) -> Tensor:
    """Return all that a network returns as one tensor [B, values]."""
    return torch.cat([leaf.flatten(1) for leaf in tree_leaves(network(images)) if isinstance(leaf, Tensor)], dim=1)


def spec_of(name: str) -> ImageSpec:
    channels, height, width = ZOO[name].image
    return ImageSpec(10, channels, (height, width))


def observe_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no network be described by its family."""
    monkeypatch.setattr(anatomy_module, "unwrap", lambda network: (unwrap(network)[0], None))


def test_ten_families_of_three_libraries_and_two_modules_have_the_part() -> None:
    """What the next test trains; the networks of one module of timm are one family."""
    libraries = {"timm", "transformers", "torchvision", "hand-written"}
    for treatment in (*SURGERY, "patch_diversity"):
        asked = (*NETWORKS, *OF_SEQUENCES.get(treatment, ()))
        fitting = [network for network in asked if treatment not in REFUSALS.get(network, {})]
        own = [network for network in fitting if network.startswith("hand-written/")]
        assert {network.partition("/")[0] for network in fitting} == libraries, treatment
        assert len(own) >= 2, treatment
        assert len({family_of(network) for network in fitting if network not in own}) >= 10, treatment


def family_of(network: str) -> str:
    library, _, name = network.partition("/")
    return timm.models.model_entrypoint(name).__module__ if library == "timm" else name


@pytest.mark.parametrize(("treatment", "network"), PAIRS)
def test_it_trains_two_steps_or_names_the_missing_part(treatment: str, network: str) -> None:
    untreated, images = ZOO[network].awake(), ZOO[network].images()
    names, core = set(untreated.state_dict()), unwrap(untreated)[0]
    entry = {treatment: SURGERY[treatment]}
    if (why := REFUSALS.get(network, {}).get(treatment)) is not None:
        part = re.escape(known_treatments()[treatment].part)
        whole = rf"^{treatment} does not fit {type(core).__name__}: it needs {part}; .*{why}"
        with pytest.raises(TreatmentError, match=rf"({whole}|^{treatment} does not fit \S+: {why})"):
            treat(untreated, entry, spec=spec_of(network))
        assert set(untreated.state_dict()) == names
        return
    before = answer(untreated, images)
    torch.manual_seed(0)
    treated = treat(untreated, entry, spec=spec_of(network))
    assert treatments_of(treated) == (treatment,)
    assert {
        key for key in names - set(treated.state_dict()) if not re.search(REPLACED.get(treatment, "^$"), key)
    } == set()
    if treatment not in ("talking_heads", "patch_dropout", "sequence_pooling"):  # start as the identity, or the mean
        assert (answer(treated, images) - before).abs().max() > 1e-7
    added = {key: p for key, p in treated.named_parameters() if key not in names}
    start = {key: p.detach().clone() for key, p in added.items()}
    train_two_steps(treated, images)
    for key, parameter in added.items():
        assert parameter.grad is not None, key
        assert parameter.isfinite().all()
    assert not added or any(not torch.equal(p, start[key]) for key, p in added.items())


def train_two_steps(network: nn.Module, images: Tensor) -> None:
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(answer(network, images), torch.arange(len(images)))
        assert loss.isfinite()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("network", MATRIX)
def test_patch_losses_train_two_steps(network: str) -> None:
    untreated, images = ZOO[network].build().train(), ZOO[network].images()
    options = {} if "swin" not in network.lower() and "pit" not in network else {"contrastive": 0.0}
    diversity = PatchDiversity(untreated, classes=10, size=spec_of(network).img_size, **options)
    optimizer = torch.optim.SGD([*untreated.parameters(), *diversity.parameters()], lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        mixed, _, patch_targets = diversity.mix(images, torch.arange(len(images)))
        answer(untreated, mixed)
        losses = diversity(patch_targets)
        sum(losses.values(), torch.zeros(())).backward()
        optimizer.step()
        assert all(loss.isfinite() for loss in losses.values())
    assert any(p.grad is not None and p.grad.any() for p in untreated.parameters())
    assert all(p.grad is not None for p in diversity.parameters())


@pytest.mark.parametrize("network", MATRIX)
@pytest.mark.parametrize(
    ("treatment", "options"),
    [
        ("context_broadcasting", {"scaled": True}),
        ("talking_heads", {}),
        ("local_attention", {"kernel": 99}),
        ("patch_dropout", {"rate": 0.0}),
    ],
)
def test_a_neutral_setting_leaves_the_outputs(treatment: str, options: dict[str, Any], network: str) -> None:
    if treatment in REFUSALS.get(network, {}):
        pytest.skip("does not fit")
    untreated, images = ZOO[network].awake(), ZOO[network].images()
    with torch.no_grad():
        before = answer(untreated, images)
        after = answer(treat(untreated, {treatment: options}, spec=spec_of(network)), images)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "network",
    [pytest.param(network, marks=[] if network == FAST[1] else [pytest.mark.slow], id=network) for network in NETWORKS],
)
@pytest.mark.parametrize("treatment", SURGERY)
def test_a_copy_of_a_treated_network_is_independent(treatment: str, network: str) -> None:
    if treatment in REFUSALS.get(network, {}):
        pytest.skip("does not fit")
    images = ZOO[network].images()
    treated = treat(ZOO[network].awake(), {treatment: SURGERY[treatment]}, spec=spec_of(network)).eval()
    copied = copy.deepcopy(treated)
    with torch.no_grad():
        before = answer(treated, images)
        assert torch.equal(answer(copied, images), before)
        for parameter in copied.parameters():
            parameter.mul_(0.9)
        assert torch.equal(answer(treated, images), before)
        assert not torch.equal(answer(copied, images), before)


BY_FAMILY = ("timm/vit_tiny_patch16_224", "torchvision/vit", "torchvision/swin")


@pytest.mark.parametrize("network", BY_FAMILY)
@pytest.mark.parametrize(
    "treatment", ["no_softmax", "local_attention", "talking_heads", "context_broadcasting", "squeeze_excitation"]
)
def test_an_observed_network_is_treated_as_its_family_would(
    treatment: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows with seams (Swin), class tokens and grids are the same, whichever way they were found."""
    images, outputs = ZOO[network].images(), []
    for observed in (False, True):
        if observed:
            observe_all(monkeypatch)
        torch.manual_seed(0)
        treated = treat(ZOO[network].awake(), {treatment: SURGERY[treatment]}, spec=spec_of(network)).eval()
        with torch.no_grad():
            outputs.append(answer(treated, images))
    scale = outputs[0].abs().max().item()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5 * max(1.0, scale))


def test_local_attention_of_an_observed_network_is_a_mask_of_near_cells() -> None:
    """Rows and columns of patches at most one apart, and the class token; computed by hand from the unit's map."""
    name = "hand-written/linear_patch_vit"
    treated = treat(ZOO[name].awake(), {"local_attention": {"kernel": 3}}, spec=spec_of(name))
    (seen, *_) = [unit.attention for unit in Anatomy.of(treated, ZOO[name].images()).of_kind("msa")]
    assert seen is not None
    assert seen.seen is not None
    cells = [(row, column) for row in range(4) for column in range(4)]
    near = torch.tensor([[max(abs(a - c), abs(b - d)) <= 1 for c, d in cells] for a, b in cells])
    torch.testing.assert_close(seen.seen.visibility()[0], F.pad(near, (1, 0, 1, 0), value=True))


def test_where_the_network_mixes_heads_after_the_softmax_hidden_keys_stay_hidden() -> None:
    """CaiT's mixture has a bias, which would give every key a weight: far tokens must not reach each other."""
    name = "timm/cait_xxs24_224"
    treated = treat(ZOO[name].awake(), {"local_attention": {"kernel": 3}}, spec=spec_of(name))
    attention = treated.blocks[0].attn
    assert attention.proj_w.bias.abs().min() > 1e-3
    tokens = torch.randn(1, 16, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for token, near in ((0, {0, 1, 4, 5}), (6, {1, 2, 3, 5, 6, 7, 9, 10, 11})):
        (gradient,) = torch.autograd.grad(attention(tokens)[0, token].sum(), tokens)
        assert set(gradient[0].abs().sum(-1).nonzero().flatten().tolist()) == near


def test_attention_between_two_grids_stays_as_it_is_where_other_attention_is_local() -> None:
    """Twins attends in windows, and from all tokens to a subsampled grid in turn; its last grids are the same."""
    name = "timm/twins_svt_small"
    treated = treat(ZOO[name].build(), {"local_attention": {"kernel": 3}}, spec=spec_of(name))
    edited = {path: hasattr(module, "neighbourhood") for path, module in treated.named_modules() if "attn" in path}
    assert edited["blocks.0.0.attn"]
    assert not edited["blocks.0.1.attn"]
    assert treated.blocks[0][0].attn.neighbourhood.pairs.shape == (9, 1, 49, 49)


@pytest.mark.parametrize("name", ["timm/vit_pwee_patch16_reg1_gap_256", "timm/vit_dwee_patch16_reg1_gap_256"])
def test_an_extra_block_has_the_heads_of_maps_that_cannot_be_edited(name: str) -> None:
    """Attention in parallel with an MLP, and the difference of two maps of three heads each."""
    treated = treat(ZOO[name].awake(), "extra_block", spec=spec_of(name))
    assert treated.blocks[-1].attn.attn.num_heads == 3
    train_two_steps(treated, ZOO[name].images())


@pytest.mark.parametrize("name", ["hand-written/dict_vit", "hand-written/dataclass_vit"])
def test_a_mean_of_patches_for_a_network_that_returns_several_things(name: str) -> None:
    before = ZOO[name].awake()
    treated = treat(ZOO[name].awake(), "gap_head", spec=spec_of(name))
    with torch.no_grad():
        answers = [network(ZOO[name].images()) for network in (before, treated)]
    values = [answer if isinstance(answer, dict) else vars(answer) for answer in answers]
    assert all((values[0][key] - values[1][key]).abs().max() > 1e-6 for key in values[0])


def test_an_empty_module_is_no_activation() -> None:
    """A ResNet's skip is an empty Sequential, which is false as a truth value."""
    name = "hand-written/inline_resnet"
    with pytest.raises(TreatmentError, match="relu_activation does not fit InlineResNet: it needs a GELU"):
        treat(ZOO[name].build(), "relu_activation", spec=spec_of(name))


def test_a_mask_that_was_examined_at_another_size_is_a_sentence() -> None:
    name = "hand-written/sequence_first_vit"
    treated = treat(ZOO[name].awake(), "local_attention", spec=spec_of(name))
    (attention, *_) = [module for module in treated.modules() if hasattr(module, "neighbourhood")]
    with pytest.raises(TreatmentError, match="saw 5 queries and 5 keys where 17 and 17 were examined"):
        attention.neighbourhood.near(2, 5, 5, torch.device("cpu"))


def test_a_network_written_without_modules_has_one_part_for_each_mlp() -> None:
    name = "hand-written/functional_vit"
    treated = treat(ZOO[name].awake(), {"context_broadcasting": {"scaled": True}}, spec=spec_of(name))
    parts = [key for key, _ in treated.named_parameters() if "context_broadcasting" in key]
    assert parts == ["context_broadcasting.scale", "context_broadcasting_2.scale"]
    train_two_steps(treated, ZOO[name].images())
    assert all(treated.get_parameter(key).grad.any() for key in parts)


def test_a_network_of_no_family_needs_no_spec() -> None:
    name = "hand-written/linear_patch_vit"
    assert image_spec(ZOO[name].build()) == ImageSpec(10, 3, (32, 32))
    assert treatments_of(treat(ZOO[name].build(), "context_broadcasting")) == ("context_broadcasting",)


def test_an_extra_block_follows_the_blocks_that_see_all_tokens() -> None:
    """CaiT's last blocks see the class token alone, and hand on that token."""
    name = "timm/cait_xxs24_224"
    treated = treat(ZOO[name].awake(), "extra_block", spec=spec_of(name))
    assert type(treated.blocks[-1]).__name__ == "MsaBlock"
    assert len(treated.blocks_token_only) == len(ZOO[name].build().blocks_token_only)


class _OwnDerivative(torch.autograd.Function):
    """Attention with a derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, weights = ctx.saved_tensors
        slope = grad @ v.mT
        scores = weights * (slope - (slope * weights).sum(-1, keepdim=True))
        return scores @ k, scores.mT @ q, weights.mT @ grad


class _OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(_OwnDerivative.apply(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("treatment", ["talking_heads", "no_softmax", "uniform_heads"])
def test_a_map_with_a_derivative_of_its_own_is_not_edited(treatment: str) -> None:
    torch.manual_seed(0)
    network = OrderedViT()
    for block in network.blocks:
        block.attention = _OwnAttention()
    with pytest.raises(TreatmentError, match="computed without gradients"):
        treat(network, treatment, spec=ImageSpec(CLASSES, 3, (SIDE, SIDE)))
