"""Talking heads: nothing changes at first, and then heads mix as the formula says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.treatments.attentions import allowed_pairs, heads_of, images, joined, pit, vit
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.treatments import treat


def written_out(attention: Any, x: torch.Tensor, logits_mix: torch.Tensor, weights_mix: torch.Tensor) -> torch.Tensor:
    """Head by head, over the neighbours in a 3 x 3 window where the attention has one."""
    q, k, v = heads_of(attention, x)
    near = getattr(attention, "allowed", torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    heads = range(q.shape[1])
    logits = [q[:, h] @ k[:, h].mT / q.shape[-1] ** 0.5 for h in heads]
    talked = [sum(logits_mix[h, i] * logits[i] for i in heads) for h in heads]
    maps = [torch.softmax(logit.masked_fill(~near, -torch.inf), -1) for logit in talked]
    weights = [sum(weights_mix[h, i] * maps[i] for i in heads) for h in heads]
    return joined(attention, x, torch.stack([weights[h] @ v[:, h] for h in heads], dim=1))


@pytest.mark.parametrize("build", [vit, pit])
@pytest.mark.parametrize("fused", [True, False])
def test_at_first_nothing_changes(build: Any, fused: bool) -> None:
    network = build()
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    x = images(network)
    before = network(x)
    torch.testing.assert_close(treat(network, "talking_heads")(x), before, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("grid", [(4, 6), (12, 3)])
def test_heads_mix_before_and_behind_the_softmax(local: bool, grid: tuple[int, int]) -> None:
    network = vit(grid, depth=1, num_heads=4)
    original = copy.deepcopy(network.blocks[0].attn)
    if local:
        original.allowed = allowed_pairs(grid, 3, 1)
    attention = treat(network, *(["local_attention"] if local else []), "talking_heads").blocks[0].attn
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for mix in (attention.logits_mix, attention.weights_mix):
            mix.copy_(torch.randn(4, 4, generator=generator))
    x = torch.randn(2, 1 + grid[0] * grid[1], 24, generator=generator, dtype=torch.float64)
    expected = written_out(original, x, attention.logits_mix, attention.weights_mix)
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-10)


def test_it_adds_two_square_matrices_a_block() -> None:
    before = vit(depth=3, num_heads=4)
    after = treat(vit(depth=3, num_heads=4), "talking_heads")
    new = set(after.state_dict()) - set(before.state_dict())
    assert new == {f"blocks.{i}.attn.{name}" for i in range(3) for name in ("logits_mix", "weights_mix")}
    assert set(before.state_dict()) < set(after.state_dict())
    count = sum(p.numel() for p in after.parameters()) - sum(p.numel() for p in before.parameters())
    assert count == 3 * 2 * 4**2


@pytest.mark.parametrize("grid", [(4, 6), (12, 3)])
def test_the_recorded_map_is_the_softmax_between_the_mixes(grid: tuple[int, int]) -> None:
    network = treat(vit(grid, depth=1), "talking_heads", "local_attention")
    attention = network.blocks[0].attn
    with torch.no_grad():
        attention.weights_mix.mul_(3.0)
    maps = []
    with record_attention(Anatomy.of(network).of_kind("msa"), lambda seen: maps.append(seen.weights)):
        network(images(network))
    (weights,) = maps
    assert weights.shape == (2, 2, 1 + grid[0] * grid[1], 1 + grid[0] * grid[1])
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert (weights[..., ~allowed_pairs(grid, 3, 1)] == 0).all()
