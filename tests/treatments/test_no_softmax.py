"""ViT-Free: the logits are the weights, and there is no map to record."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.treatments.attentions import allowed_pairs, heads_of, images, joined, pit, vit
from vitclinic._core.errors import AnatomyError, TreatmentError
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.treatments import treat


def by_logits(attention: Any, x: torch.Tensor, factor: torch.Tensor | float = 1.0) -> torch.Tensor:
    q, k, v = heads_of(attention, x)
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5 * factor
    return joined(attention, x, torch.einsum("bhqk,bhkd->bhqd", logits, v))


def tokens(number: int) -> torch.Tensor:
    return torch.randn(2, number, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"scale_attn_norm": True}, {"reg_tokens": 3}])
def test_the_logits_are_the_weights(options: dict[str, Any]) -> None:
    network = vit(depth=1, **options)
    original = copy.deepcopy(network.blocks[0].attn)
    x = tokens(network.num_prefix_tokens + 24)
    treated = treat(network, "no_softmax").blocks[0].attn
    torch.testing.assert_close(treated(x), by_logits(original, x), rtol=1e-10, atol=1e-10)


def test_doubling_the_query_doubles_what_attention_adds() -> None:
    network = treat(vit(depth=1), "no_softmax")
    attention, x = network.blocks[0].attn, tokens(25)
    with torch.no_grad():
        once = attention(x) - attention.proj.bias
        attention.qkv.weight[:24] *= 2
        attention.qkv.bias[:24] *= 2
        torch.testing.assert_close(attention(x) - attention.proj.bias, 2 * once)


def test_a_mask_takes_keys_out_and_dropout_takes_out_weights() -> None:
    network = vit(depth=1, attn_drop_rate=0.5)
    original = copy.deepcopy(network.blocks[0].attn)
    attention, x = treat(network, "no_softmax").blocks[0].attn, tokens(25)
    mask = torch.rand(25, 25, generator=torch.Generator().manual_seed(4)) > 0.3
    expected = by_logits(original, x, mask.double())
    torch.testing.assert_close(attention(x, attn_mask=mask), expected)
    added = torch.zeros(25, 25, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attention(x, attn_mask=added), expected)
    attention.train()
    torch.manual_seed(0)
    draws = torch.stack([attention(x) for _ in range(300)])
    error = draws.std(0) / len(draws) ** 0.5
    assert error.max() > 0
    assert ((draws.mean(0) - by_logits(original, x)).abs() <= 6 * error).all()


@pytest.mark.parametrize("order", [("local_attention", "no_softmax"), ("no_softmax", "local_attention")])
@pytest.mark.parametrize("grid", [(4, 6), (12, 3)])
def test_it_goes_with_local_attention(order: tuple[str, str], grid: tuple[int, int]) -> None:
    network = vit(grid, depth=1)
    original = copy.deepcopy(network.blocks[0].attn)
    attention = treat(network, *order).blocks[0].attn
    x = tokens(1 + grid[0] * grid[1])
    expected = by_logits(original, x, allowed_pairs(grid, 3, 1).double())
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", [vit, pit])
def test_there_is_no_map_to_record_and_recording_says_so(build: Any) -> None:
    units = Anatomy.of(treat(build(), "no_softmax")).of_kind("msa")
    assert units
    assert all(unit.attention is None for unit in units)
    message = r"do not apply to .*\.msa: it has no softmax over tokens"
    with pytest.raises(AnatomyError, match=message), record_attention(units, lambda _: None):
        pass


def test_the_network_computes_something_else_with_the_same_weights() -> None:
    network = vit()
    keys, x = set(network.state_dict()), images(network)
    before = network(x)
    treated = treat(network, "no_softmax")
    assert set(treated.state_dict()) == keys
    assert (treated(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("order", [("talking_heads", "no_softmax"), ("no_softmax", "talking_heads")])
def test_it_does_not_go_with_talking_heads(order: tuple[str, str]) -> None:
    with pytest.raises(TreatmentError, match="both mixes are one; leave out one of the two"):
        treat(vit(), *order)
