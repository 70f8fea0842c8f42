"""Attention maps: every way of computing attention, and what recording must not do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import timm
import torch
import torchvision.models as tv
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from tests.anatomy.networks import cut, shaken, tiny_vit
from tests.anatomy.test_contract import hooks
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, AttentionMap, double_differentiable, record_attention
from vitclinic.anatomy.attention import _map_of_sdpa, _weights_of_mha
from vitclinic.anatomy.maps import AttentionCall

IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def maps_of(network: nn.Module, images: Tensor = IMAGES) -> dict[str, AttentionMap]:
    maps: dict[str, AttentionMap] = {}
    units = [unit for unit in Anatomy.of(network).units if unit.attention]
    with record_attention(units, lambda seen: maps.__setitem__(seen.unit.name, seen)), torch.no_grad():
        network(images)
    return maps


def _bool_mask(queries: int, keys: int) -> Tensor:
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[1] = False  # a query that sees nothing
    return mask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": _bool_mask(5, 7)},
        {"attn_mask": torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(0))},
        {"attn_mask": torch.zeros(5, 7).masked_fill(~_bool_mask(5, 7), -torch.inf), "scale": 2.0},
        {"enable_gqa": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_map_of_fused_attention_times_v_is_its_output(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    groups = 2 if options.get("enable_gqa") else 4
    query = torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, groups, 7, 8, generator=generator, dtype=torch.float64)
    options = {
        name: o.double() if isinstance(o, Tensor) and o.is_floating_point() else o for name, o in options.items()
    }
    weights, _ = _map_of_sdpa(AttentionCall(query, key, value, **options))
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(weights @ value.repeat_interleave(4 // groups, 1), expected)


def test_the_map_of_multi_head_attention_follows_its_masks() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5).double().train()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    seen: list[Tensor] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.multi_head_attention_forward:
                seen.append(_weights_of_mha(*args, **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Mode():
        attention(x, x, x, key_padding_mask=padding, need_weights=False)
    _, expected = attention.eval()(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(seen[0], expected)
    assert not seen[0][0, ..., 3:].any()


def test_fused_and_written_out_attention_give_the_same_map() -> None:
    network = shaken(tiny_vit()).eval()
    fused = maps_of(network)
    for block in network.blocks:
        block.attn.fused_attn = False
    for name, written_out in maps_of(network).items():
        torch.testing.assert_close(fused[name].weights, written_out.weights)


def test_fused_windowed_attention_carries_its_bias_and_mask_into_the_map() -> None:
    network = shaken(cut("swin_transformer", "swin_tiny_patch4_window7_224")).eval()
    images = torch.randn(2, 3, 64, 64)
    written_out = maps_of(network, images)
    for unit in Anatomy.of(network).of_kind("msa"):
        unit.module.fused_attn = True
    assert any(any(seen.windows.shift) for seen in written_out.values())
    for name, fused in maps_of(network, images).items():
        torch.testing.assert_close(fused.weights, written_out[name].weights, rtol=1e-4, atol=1e-6)


def test_the_random_numbers_of_training_are_the_same_with_and_without_recording() -> None:
    for network, images in (
        (tiny_vit(attn_drop_rate=0.3, proj_drop_rate=0.3), IMAGES),
        (tv.VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.3, attention_dropout=0.3), IMAGES[..., :32]),
    ):
        shaken(network).train()
        units = Anatomy.of(network).of_kind("msa")
        torch.manual_seed(5)
        expected = network(images)
        torch.manual_seed(5)
        with record_attention(units, lambda seen: None):
            recorded = network(images)
        assert torch.equal(recorded, expected)


def test_only_the_units_asked_for_are_recorded_and_no_map_is_kept() -> None:
    network = shaken(tiny_vit(depth=3)).eval()
    unit = Anatomy.of(network).unit("blocks.1.msa")
    names: list[str] = []
    alive: list[weakref.ref[Tensor]] = []

    def look(seen: AttentionMap) -> None:
        names.append(seen.unit.name)
        alive.append(weakref.ref(seen.weights))

    with record_attention([unit], look), torch.no_grad():
        network(IMAGES)
        network(IMAGES)
        gc.collect()
        assert names == ["blocks.1.msa"] * 2
        assert all(reference() is None for reference in alive)


def test_a_map_that_was_never_seen_is_an_error() -> None:
    network = tiny_vit()
    units = Anatomy.of(network).of_kind("msa")
    with (
        pytest.raises(AnatomyError, match=r"the attention of blocks\.0\.msa, blocks\.1\.msa never ran"),
        record_attention(units, print),
    ):
        pass
    assert not hooks(network)


def test_outlook_attention_has_no_map() -> None:
    network = cut("volo", "volo_d1_224")
    outlook = Anatomy.of(network).unit("network.0.0.msa")
    with pytest.raises(AnatomyError, match="do not apply"), record_attention([outlook], print):
        pass


def test_the_two_maps_of_differential_attention_are_groups_of_heads() -> None:
    network = tiny_vit(attn_layer="diff").eval()
    anatomy = Anatomy.of(network)
    seen: list[AttentionMap] = []
    with record_attention(anatomy.of_kind("msa"), seen.append), torch.no_grad():
        network(IMAGES)
    assert {one.weights.shape[1] for one in seen} == {2 * network.blocks[0].attn.num_heads}
    assert all(torch.allclose(one.weights.sum(-1), torch.ones(())) for one in seen)


def test_attention_that_is_not_one_softmax_is_an_error_and_the_network_works_on() -> None:
    network = tiny_vit().eval()
    for block in network.blocks:
        attend = block.attn.forward
        block.attn.forward = lambda x, *args, attend=attend, **kwargs: attend(x) - 0.1 * attend(x)
    units = Anatomy.of(network).of_kind("msa")
    before = network(IMAGES)
    with pytest.raises(AnatomyError, match="not one softmax"), record_attention(units, lambda seen: None):
        network(IMAGES)
    assert not hooks(network)
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(network(IMAGES), before)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_recording_ends_with_any_error(error: type[BaseException]) -> None:
    network = tiny_vit().eval()
    unit = Anatomy.of(network).unit("blocks.0.msa")

    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(error), record_attention([unit], fail):
        network(IMAGES)
    assert not hooks(network)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_hook_that_fails_before_recording_starts_leaves_other_modes_alone() -> None:
    network = tiny_vit().eval()
    unit = Anatomy.of(network).unit("blocks.0.msa")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = unit.module.register_forward_pre_hook(fail)
    with BaseTorchFunctionMode() as outer:
        with pytest.raises(ZeroDivisionError), record_attention([unit], print):
            network(IMAGES)
        assert torch.overrides._get_current_function_mode_stack() == [outer]
    handle.remove()


def test_the_grid_is_that_of_the_images_at_hand() -> None:
    network = shaken(tiny_vit(dynamic_img_size=True)).eval()
    maps = maps_of(network, torch.randn(1, 3, 64, 24))
    seen = maps["blocks.0.msa"]
    assert (seen.grid, seen.prefix, seen.windows) == ((8, 3), 1, None)
    assert seen.positions().tolist()[0][:4] == [[0, 0], [0, 1], [0, 2], [1, 0]]


def test_class_attention_has_one_query() -> None:
    seen = maps_of(cut("volo", "volo_d1_224"), torch.randn(2, 3, 64, 64))["post_network.0.msa"]
    assert seen.weights.shape == (2, 2, 1, 1 + 4 * 4)
    assert (seen.grid, seen.prefix) == ((4, 4), 1)


def test_fused_attention_has_no_second_derivative_outside_the_context() -> None:
    network = tiny_vit()
    compiled: Any = torch.compile(network, backend="eager")
    weight = network.blocks[0].attn.qkv.weight

    def second_derivative(model: Any) -> Tensor:
        (gradient,) = torch.autograd.grad(model(IMAGES).square().sum(), weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    assert timm.layers.use_fused_attn()
    with pytest.raises(RuntimeError, match="derivative"):
        second_derivative(network)
    with double_differentiable():
        torch.testing.assert_close(second_derivative(compiled), second_derivative(network))


@pytest.mark.parametrize("fused", [True, False])
def test_a_unit_recorded_twice_is_shown_twice(fused: bool) -> None:
    network = shaken(tiny_vit()).eval()
    unit = Anatomy.of(network).of_kind("msa")[0]
    unit.attention.module.fused_attn = fused
    seen: list[Tensor] = []

    def keep(shown: AttentionMap) -> None:
        seen.append(shown.weights.log().softmax(-1))  # a softmax of the consumer's is nobody's attention

    with record_attention([unit, unit], keep), record_attention([unit], keep), torch.no_grad():
        network(IMAGES)
    assert len(seen) == 3
    for weights in seen[1:]:
        torch.testing.assert_close(weights, seen[0])


def test_a_consumer_that_writes_into_the_networks_own_map_is_an_error() -> None:
    network = shaken(tiny_vit()).eval()
    unit = Anatomy.of(network).of_kind("msa")[0]
    unit.attention.module.fused_attn = False
    with (
        pytest.raises(AnatomyError, match=r"blocks.0.msa was modified.*weights\.clone"),
        record_attention([unit], lambda shown: shown.weights.zero_()),
        torch.no_grad(),
    ):
        network(IMAGES)
