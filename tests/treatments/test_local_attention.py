"""Local attention: dense masked attention for every kernel, global attention where the window covers all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.treatments.attentions import allowed_pairs, images, masked_softmax_attention, pit, vit
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy import Anatomy, double_differentiable, record_attention
from vitclinic.treatments import parse_treatments, treat
from vitclinic.treatments.neighbourhood import neighbours


def local(network: nn.Module, kernel: int | str = 3) -> nn.Module:
    return treat(network, {"local_attention": {"kernel": kernel}})


def tokens(network: Any, grid: tuple[int, int]) -> torch.Tensor:
    number = network.num_prefix_tokens + grid[0] * grid[1]
    return torch.randn(2, number, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * other.detach().abs().max().item())


BANDED = (12, 5)
"""A grid that is cut into bands for a kernel of 3: two rows of queries, four of keys."""


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}, {"qk_norm": True}]
)
@pytest.mark.parametrize(
    ("grid", "kernel"), [((4, 6), 3), ((4, 6), 1), ((5, 3), 5), (BANDED, 3), ((7, 4), 1), ((13, 4), 3), ((24, 3), 5)]
)
def test_every_kernel_equals_dense_masked_attention(
    grid: tuple[int, int], kernel: int, options: dict[str, Any], fused: bool
) -> None:
    network = vit(grid, depth=1, **options)
    network.blocks[0].attn.fused_attn = fused
    original = copy.deepcopy(network.blocks[0].attn)
    attention = local(network, kernel).blocks[0].attn
    x = tokens(network, grid)
    expected = masked_softmax_attention(original, x, allowed_pairs(grid, kernel, network.num_prefix_tokens))
    assert_same(attention(x), expected)


@given(rows=st.integers(1, 16), columns=st.integers(1, 6), reach=st.integers(0, 4), prefix=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_the_mask_is_the_definition_pair_by_pair(rows: int, columns: int, reach: int, prefix: int) -> None:
    kernel = 2 * reach + 1
    assert torch.equal(neighbours((rows, columns), kernel, prefix), allowed_pairs((rows, columns), kernel, prefix))


@pytest.mark.parametrize("kernel", [11, 13, "global"])
def test_a_window_that_sees_everything_is_global_attention(kernel: int | str) -> None:
    network = vit((4, 6))
    x = images(network)
    expected = network(x)
    assert_same(local(network, kernel)(x), expected)


def test_a_window_one_smaller_is_not() -> None:
    network = vit((4, 6))
    x = images(network)
    expected = network(x)
    assert (local(network, 9)(x) - expected).abs().max() > 1e-6


def test_banded_gradients_are_those_of_dense_masked_attention() -> None:
    network = vit(BANDED, depth=1)
    original = copy.deepcopy(network.blocks[0].attn)
    attention = local(network).blocks[0].attn
    assert attention.neighbourhood.banded
    x, cotangent = tokens(network, BANDED), tokens(network, BANDED).flip(1)
    (attention(x) * cotangent).sum().backward()
    (masked_softmax_attention(original, x, allowed_pairs(BANDED, 3, 1)) * cotangent).sum().backward()
    for (name, mine), (other, theirs) in zip(attention.named_parameters(), original.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_second_derivatives_exist_in_bands() -> None:
    network = local(vit(BANDED, depth=1))
    with double_differentiable():
        loss = network(images(network)).square().sum()
        weight = network.blocks[0].attn.qkv.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), weight)
    assert second.abs().max() > 0


@pytest.mark.parametrize("grid", [(4, 6), BANDED])
def test_a_mask_from_outside_holds_too(grid: tuple[int, int]) -> None:
    network = vit(grid, depth=1)
    original = copy.deepcopy(network.blocks[0].attn)
    attention = local(network).blocks[0].attn
    x = tokens(network, grid)
    near = allowed_pairs(grid, 3, 1)
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(near.shape, generator=generator) > 0.3
    mask.fill_diagonal_(True)
    assert_same(attention(x, attn_mask=mask), masked_softmax_attention(original, x, near & mask))
    added = torch.randn(near.shape, generator=generator, dtype=torch.float64)
    assert_same(attention(x, attn_mask=added), masked_softmax_attention(original, x, near, added))
    assert_same(attention(x, is_causal=True), masked_softmax_attention(original, x, near.tril()))


@pytest.mark.parametrize("fused", [True, False])
def test_attention_dropout_is_drawn_in_training_only(fused: bool) -> None:
    network = vit(BANDED, depth=1, attn_drop_rate=0.5)
    network.blocks[0].attn.fused_attn = fused
    attention = local(network).blocks[0].attn
    x = tokens(network, BANDED)
    assert torch.equal(attention(x), attention(x))
    attention.train()
    torch.manual_seed(0)
    draws = torch.stack([attention(x) for _ in range(200)])
    assert (draws[0] - draws[1]).abs().max() > 1e-3
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - attention.eval()(x)).abs() <= 6 * error + 1e-12).all()


def test_pit_is_local_on_the_grid_of_each_stage() -> None:
    network = pit()
    originals = [copy.deepcopy(stage.blocks[0].attn) for stage in network.transformers]
    treated = local(network)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for index, stage in enumerate(treated.transformers):
        stage.blocks[0].attn.register_forward_hook(
            lambda _, args, output, index=index: seen.__setitem__(index, (args[0], output))
        )
    treated(images(treated))
    for index, side in enumerate((15, 8, 4)):
        x, output = seen[index]
        assert_same(output, masked_softmax_attention(originals[index], x, allowed_pairs((side, side), 3, 1)))


def test_the_grid_of_a_network_of_dynamic_size_is_the_image_s() -> None:
    network = vit((4, 6), depth=1, dynamic_img_size=True)
    twin = local(vit((6, 4), depth=1, dynamic_img_size=True))
    # The same embedding for every place, so that resampling it changes nothing.
    for each in (network, twin):
        each.pos_embed.data[:] = 1.0
    treated = local(network)
    turned = torch.randn(2, 3, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        assert_same(treated(turned), twin(turned))
    treated(turned).sum().backward()
    copied = copy.deepcopy(treated)
    copied(turned.transpose(2, 3))
    assert copied.blocks[0].attn.neighbourhood.size == (4, 6)
    assert treated.blocks[0].attn.neighbourhood.size == (6, 4)


@pytest.mark.parametrize(("grid", "kernel"), [((4, 6), 3), (BANDED, 3), ((4, 6), 99)])
def test_recorded_maps_are_whole_and_zero_outside_the_neighbourhood(grid: tuple[int, int], kernel: int) -> None:
    network = vit(grid, reg_tokens=1)
    originals = [copy.deepcopy(block.attn) for block in network.blocks]
    treated = local(network, kernel)
    allowed = allowed_pairs(grid, kernel, 2)
    maps, states = [], []
    for block in treated.blocks:
        block.attn.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    x = images(treated)
    plain = treated(x)
    states.clear()
    with record_attention(Anatomy.of(treated).of_kind("msa"), lambda seen: maps.append(seen.weights)):
        states.clear()
        recorded = treated(x)
    torch.testing.assert_close(recorded, plain, rtol=1e-10, atol=1e-10)
    for original, weights, state in zip(originals, maps, states, strict=True):
        assert (weights[..., ~allowed] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        values = original.qkv(state)[..., 48:].unflatten(-1, (2, 12)).transpose(1, 2)
        product = original.proj((weights @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(product, masked_softmax_attention(original, state, allowed))
    assert all(block.attn.in_pieces for block in treated.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_and_autocast_run_in_bands(dtype: torch.dtype) -> None:
    network = vit(BANDED)
    expected = local(copy.deepcopy(network))(images(network))
    treated = local(network).to(dtype)
    output = treated(images(treated).to(dtype))
    assert output.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance * expected.detach().abs().max().item()
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert treated.float()(images(treated).float()).dtype == torch.bfloat16


def test_a_compiled_network_computes_the_same() -> None:
    network = local(vit(BANDED, depth=1))
    x = images(network)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert_same(compiled(x), network(x))


def test_the_state_dict_is_timm_s() -> None:
    assert set(local(vit(BANDED)).state_dict()) == set(vit(BANDED).state_dict())


def test_what_does_not_fit_is_a_sentence() -> None:
    for kernel in (8, 0, -1, 3.0, True, "globl"):
        sentence = rf"^'treatments\.local_attention\.kernel': must be an odd number or 'global' \(got {kernel!r}\)\.$"
        with pytest.raises(RecipeError, match=sentence):
            parse_treatments([{"local_attention": {"kernel": kernel}}])
    with pytest.raises(TreatmentError, match="patch_drop_rate=0"):
        local(vit(patch_drop_rate=0.5))
    differential = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=2, num_classes=5, attn_layer="diff"
    )
    with pytest.raises(TreatmentError, match=r"that of blocks\.0\.msa .*has several softmaxes\."):
        local(differential)
    network = local(vit((4, 6), depth=1))
    with pytest.raises(TreatmentError, match="saw 10 tokens where 1 \\+ 4 x 6"):
        network.blocks[0].attn(torch.randn(1, 10, 24, dtype=torch.float64))
