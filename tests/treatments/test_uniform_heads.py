"""Uniform heads: closed-form numbers of parameters, the formula written out, and why uniform attention is hard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.anatomy.networks import cut, shaken, tiny_vit
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, AttentionMap, record_attention
from vitclinic.treatments import UniformHeadAttention, treat
from vitclinic.treatments.uniform_heads import grow

VARIANTS = ["replace", "adjust", "append"]


def vit_parameters(width: int, heads: int, depth: int = 12, classes: int = 1000, tokens: int = 197) -> int:
    """A ViT with patches of 16 x 16 x 3, class token, biases and MLP ratio 4."""
    attention = 4 * width * (width + 1)
    mlp = 8 * width * width + 5 * width
    ends = (768 + 1) * width + (1 + tokens) * width + 2 * width + (width + 1) * classes
    return depth * (attention + mlp + 4 * width) + ends


@pytest.mark.parametrize(
    ("variant", "expected", "millions"),
    [
        ("replace", vit_parameters(384, 6) - 12 * 2 * 64 * 385, 21),
        ("adjust", vit_parameters(384, 6) - 12 * 64, 22),
        ("append", vit_parameters(448, 7) - 12 * 2 * 64 * 449, 29),
    ],
)
def test_parameters_of_deit_small_are_those_of_table_1(variant: str, expected: int, millions: int) -> None:
    network = timm.create_model("deit_small_patch16_224")
    assert sum(p.numel() for p in network.parameters()) == vit_parameters(384, 6)
    treat(network, {"uniform_heads": {"variant": variant}})
    number = sum(p.numel() for p in network.parameters())
    assert number == expected
    assert round(number / 1e6) == millions


def uniform_by_hand(old: Any, x_bnd: Tensor, value: Tensor, bias: Tensor, proj: nn.Linear, learned: int) -> Tensor:
    """Attention head by head, with a map for every head: softmax for the learned, 1/N for the last."""
    batch, n, _ = x_bnd.shape
    q, k, v = old.qkv(x_bnd).reshape(batch, n, 3, old.num_heads, old.head_dim).unbind(2)
    q, k = old.q_norm(q), old.k_norm(k)
    heads = [
        ((q[:, :, i] @ k[:, :, i].transpose(1, 2)) / old.head_dim**0.5).softmax(-1) @ v[:, :, i] for i in range(learned)
    ]
    heads.append(torch.full((n, n), 1 / n, dtype=x_bnd.dtype) @ (x_bnd @ value.T + bias))
    return proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("variant", ["replace", "adjust"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("keywords", [{"reg_tokens": 2}, {"qk_norm": True, "class_token": False, "global_pool": "avg"}])
def test_the_attention_is_the_formula(variant: str, fused: bool, keywords: dict[str, Any]) -> None:
    network = shaken(tiny_vit(num_heads=3, **keywords)).double().eval()
    for block in network.blocks:
        block.attn.fused_attn = fused
    old = copy.deepcopy(network.blocks[1].attn)
    treat(network, {"uniform_heads": {"variant": variant}})
    new = network.blocks[1].attn
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    with torch.no_grad():
        value = old.qkv.weight.reshape(3, 3, 8, 24)[2, 2]
        bias = old.qkv.bias.reshape(3, 3, 8)[2, 2]
        assert torch.equal(new.value.weight[:8], value)
        assert torch.equal(new.value.bias[:8], bias)
        assert torch.equal(new.proj.weight[:, :24], old.proj.weight)
        assert new.value.out_features == (16 if variant == "adjust" else 8)
        by_hand = uniform_by_hand(old, x, new.value.weight, new.value.bias, new.proj, learned=2)
        torch.testing.assert_close(new(x), by_hand)
    assert new.fused_attn == fused
    assert not new.training


def test_an_appended_head_is_the_formula_in_a_wider_network() -> None:
    network = shaken(tiny_vit(num_heads=3, reg_tokens=1, init_values=1e-3)).double()
    before = copy.deepcopy(network)
    treat(network, {"uniform_heads": {"variant": "append"}})
    new, old = network.blocks[0].attn, copy.deepcopy(before.blocks[0].attn)
    assert torch.equal(new.qkv.weight[:, :24], old.qkv.weight)
    old.qkv = new.qkv
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = uniform_by_hand(old, x, new.value.weight, new.value.bias, new.proj, learned=3)
        torch.testing.assert_close(new(x), expected)


@pytest.mark.parametrize(
    "keywords",
    [{}, {"reg_tokens": 2, "init_values": 1e-5, "pos_embed": "none"}, {"class_token": False, "global_pool": "avg"},
     {"num_classes": 24}, {"mlp_ratio": 1.0, "qkv_bias": False, "qk_norm": True}, {"patch_size": 24, "img_size": 48}],
)  # fmt: skip
def test_a_widened_network_has_the_shapes_that_timm_makes_at_that_width(keywords: dict[str, Any]) -> None:
    """But for the queries, keys and values of the attention, whose last head has no query and no key."""
    small = {"img_size": (32, 48), "patch_size": 8, "depth": 2, "num_classes": 5} | keywords
    wide = VisionTransformer(**small, embed_dim=36, num_heads=3)
    network = treat(VisionTransformer(**small, embed_dim=24, num_heads=2), {"uniform_heads": {"variant": "append"}})
    shapes = {name: p.shape for name, p in network.named_parameters() if ".value." not in name and ".qkv." not in name}
    assert shapes == {name: p.shape for name, p in wide.named_parameters() if ".qkv." not in name}
    for name, module in wide.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Conv2d) and not name.endswith("qkv"):
            assert str(network.get_submodule(name)) == str(module)
    assert network.embed_dim == network.num_features == network.head_hidden_size == 36
    assert network.blocks[0].attn.qkv.out_features == 3 * 2 * 12
    assert (
        network(torch.randn(2, 3, *wide.patch_embed.img_size)).shape
        == wide(torch.randn(2, 3, *wide.patch_embed.img_size)).shape
    )


def test_what_is_new_starts_as_the_network_starts() -> None:
    torch.manual_seed(0)
    network = treat(
        VisionTransformer(img_size=32, patch_size=8, embed_dim=192, depth=1, num_heads=2, num_classes=5),
        {"uniform_heads": {"variant": "append"}},
    )
    block: Any = network.blocks[0]
    assert torch.equal(block.norm1.weight, torch.ones(288))
    assert torch.equal(block.mlp.fc1.bias, torch.zeros(4 * 288))
    for weight in (block.mlp.fc1.weight[768:], block.attn.value.weight, network.pos_embed[..., 192:]):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3))
def test_what_is_grown_begins_with_the_old(shape: list[int], by: int) -> None:
    old = torch.randn(shape)
    new = grow(old, [length + by for length in shape])
    assert list(new.shape) == [length + by for length in shape]
    assert torch.equal(new[tuple(slice(length) for length in shape)], old)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("variant", "heads"), [("replace", 2), ("adjust", 2), ("append", 3)])
def test_a_recorded_map_has_the_uniform_head_last(variant: str, heads: int, fused: bool) -> None:
    network = shaken(tiny_vit()).eval()
    for block in network.blocks:
        block.attn.fused_attn = fused
    treat(network, {"uniform_heads": {"variant": variant}})
    maps: list[AttentionMap] = []
    with torch.no_grad(), record_attention(Anatomy.of(network).of_kind("msa"), maps.append):
        network(torch.randn(2, 3, 32, 48))
    assert [seen.weights.shape for seen in maps] == [(2, heads, 25, 25)] * 2
    for seen in maps:
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(2, heads, 25))
        assert torch.equal(seen.weights[:, -1], torch.full((2, 25, 25), 1 / 25))
        assert seen.weights[:, :-1].std(-1).min() > 0


def test_pit_has_uniform_heads_in_every_stage() -> None:
    network = treat(cut("pit", "pit_b_224"), "uniform_heads")
    assert sum(isinstance(module, UniformHeadAttention) for module in network.modules()) == 4


@pytest.mark.parametrize(
    ("network", "variant", "sentence"),
    [
        (lambda: tiny_vit(num_heads=1), "replace", r"blocks.0.msa: its only head would be replaced"),
        (lambda: tiny_vit(num_heads=1), "adjust", r"use variant append\."),
        (lambda: tiny_vit(scale_attn_norm=True), "adjust", r"rebuilds timm's plain Attention, and blocks.0.msa is a"),
        (lambda: cut("pit", "pit_b_224"), "append", r"PoolingVisionTransformer at a larger width; use timm's Vis"),
        (lambda: tiny_vit(mlp_layer=timm.layers.GluMlp), "append", r"blocks.0.mlp wider: it is not an MLP of two"),
        (lambda: tiny_vit(class_token=False, global_pool="map"), "append", r"cannot make attn_pool wider: it is a Att"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence_and_changes_nothing(network: Any, variant: str, sentence: str) -> None:
    network = network()
    before = str(network)
    with pytest.raises(TreatmentError, match=sentence):
        treat(network, {"uniform_heads": {"variant": variant}})
    assert str(network) == before


def test_uniform_heads_and_broadcasting_go_together_in_either_order_at_the_mlp() -> None:
    for order in (("uniform_heads", "context_broadcasting"), ("context_broadcasting", "uniform_heads")):
        network = treat(tiny_vit(), *order)
        assert network(torch.randn(1, 3, 32, 48)).isfinite().all()
    wide = treat(tiny_vit(), {"context_broadcasting": {"scaled": True}}, {"uniform_heads": {"variant": "append"}})
    assert wide.blocks[0].mlp.context_broadcasting.scale.shape == (36,)
    assert wide(torch.randn(1, 3, 32, 48)).isfinite().all()


def test_a_mask_is_refused() -> None:
    network = treat(tiny_vit(), "uniform_heads")
    with pytest.raises(TreatmentError, match="takes no mask"):
        network.blocks[0].attn(torch.randn(1, 5, 24), is_causal=True)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.1, 3))
def test_the_softmax_is_steepest_at_uniform_attention(scores: list[float], scale: float) -> None:
    """Sec. 3.1: |J|_* = lambda sum(a - a^2), largest, at lambda (1 - 1/N), where a is uniform."""

    def jacobian(s: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(lambda s: torch.softmax(scale * s, dim=0), s)

    s = torch.tensor(scores, dtype=torch.float64)
    a = torch.softmax(scale * s, dim=0)
    nuclear = torch.linalg.matrix_norm(jacobian(s), ord="nuc")
    largest = torch.linalg.matrix_norm(jacobian(torch.zeros_like(s)), ord="nuc")
    torch.testing.assert_close(jacobian(s), scale * (torch.diag(a) - torch.outer(a, a)))
    torch.testing.assert_close(nuclear, scale * (a - a**2).sum())
    torch.testing.assert_close(largest.item(), scale * (1 - 1 / len(s)))
    assert nuclear <= largest * (1 + 1e-12)
    # Strictly: the gap is lambda times the squared distance from uniform.
    torch.testing.assert_close(largest - nuclear, scale * (a - 1 / len(s)).square().sum(), rtol=1e-6, atol=1e-12)


def test_a_widened_network_learns_and_comes_back() -> None:
    network = treat(shaken(tiny_vit()), {"uniform_heads": {"variant": "append"}})
    x = torch.randn(2, 3, 32, 48)
    network(x).square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    again = treat(tiny_vit(), {"uniform_heads": {"variant": "append"}})
    again.load_state_dict(network.state_dict())
    assert torch.equal(again.eval()(x), network.eval()(x))
    assert torch.equal(copy.deepcopy(network)(x), network(x))


APPEND = {"uniform_heads": {"variant": "append"}}


def test_the_batch_norm_behind_a_projection_is_widened_with_it() -> None:
    network = treat(tiny_vit(), {"conv_stem": {"components": "1Proj+1BN+1ReLU"}})
    norm = network.patch_embed.proj.layers.norm
    norm.running_mean.normal_()
    norm.running_var.uniform_(1e-3, 9.0)
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    treat(network, APPEND)
    assert norm.num_features == 36
    assert torch.equal(norm.running_mean[:24], mean)
    assert torch.equal(norm.running_var[:24], variance)
    torch.testing.assert_close(norm.running_var[24:], variance.mean().expand(12))
    assert network(torch.randn(2, 3, 32, 48)).isfinite().all()
    assert network.patch_embed.proj.out_channels == 36


def test_the_hidden_layers_of_a_stem_stay_also_where_they_are_as_wide_as_the_network() -> None:
    network = treat(tiny_vit(), {"conv_stem": {"hidden": 24}}, APPEND)
    assert network.patch_embed.proj.layers.norm3.num_features == 24
    assert network.patch_embed.proj.out_channels == 36
    assert network(torch.randn(2, 3, 32, 48)).isfinite().all()


@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_an_extra_block_is_widened_too(kind: str) -> None:
    network = treat(tiny_vit(), {"extra_block": {"kind": kind}}, APPEND)
    assert network(torch.randn(2, 3, 32, 48)).isfinite().all()
    if kind == "mlp":
        assert network.blocks[2].mlp.fc1.weight.shape == (72, 36)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_frozen_stays_frozen(variant: str) -> None:
    network = tiny_vit().requires_grad_(False)
    network.head.requires_grad_(True)
    treat(network, {"uniform_heads": {"variant": variant}})
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
