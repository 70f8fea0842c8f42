"""The extra block: closed-form counts, the formula, initial values, and a unit of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from tests.anatomy.networks import tiny_vit
from tests.treatments.attentions import images, vit
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.treatments import treat


def extra(network: nn.Module, kind: str) -> nn.Module:
    return treat(network, {"extra_block": {"kind": kind}})


@pytest.mark.parametrize("width", [24, 48])
def test_the_two_kinds_cost_nearly_the_same(width: int) -> None:
    plain = sum(p.numel() for p in tiny_vit(embed_dim=width).parameters())
    msa, mlp = (
        sum(p.numel() for p in extra(tiny_vit(embed_dim=width), kind).parameters()) - plain for kind in ("msa", "mlp")
    )
    assert msa == (3 * width**2 + 3 * width) + (width**2 + width) + 2 * width
    assert mlp == (2 * width**2 + 2 * width) + (2 * width**2 + width) + 2 * width
    assert msa - mlp == width


def scrambled(block: nn.Module) -> Any:
    """The block at ordinary values: new branches start near zero."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return block


@pytest.mark.parametrize("options", [{}, {"init_values": 0.1}, {"block_fn": ResPostBlock}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_it_adds_one_branch_behind_the_last_block(kind: str, options: dict[str, Any]) -> None:
    network = vit(**options)
    last = copy.deepcopy(network.blocks[-1])
    x = images(network)
    before = network.blocks(network.norm_pre(network._pos_embed(network.patch_embed(x))))
    block = scrambled(extra(network, kind).blocks[2])
    # The same half of a whole block of timm's, with the other half's branch taken away.
    for name in ("norm", "ls"):
        if hasattr(last, f"{name}1"):
            getattr(last, f"{name}1").load_state_dict(getattr(block, name).state_dict())
            getattr(last, f"{name}2").load_state_dict(getattr(block, name).state_dict())
    if kind == "msa":
        last.attn.load_state_dict(block.attn.state_dict())
        last.drop_path2 = Nothing()
    else:
        last.mlp = block.mlp
        last.drop_path1 = Nothing()
    torch.testing.assert_close(block(before), last(before))
    torch.testing.assert_close(network.forward_features(x), network.norm(last(before)))


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_the_anatomy_lists_it(kind: str) -> None:
    treated = extra(vit(), kind)
    anatomy = Anatomy.of(treated)
    plain = [unit.name for unit in Anatomy.of(vit()).units]
    assert [unit.name for unit in anatomy.units] == [*plain[:-1], f"blocks.2.{kind}", "head"]
    unit = anatomy.unit(f"blocks.2.{kind}")
    x = images(treated)
    scrambled(treated.blocks[2])
    with anatomy.remove(unit):
        torch.testing.assert_close(treated(x), treated.head(treated.norm(features(treated, x, 2))[:, 0]))
    maps = []
    with record_attention([each for each in anatomy.units if each.attention], lambda seen: maps.append(seen)):
        treated(x)
    assert len(maps) == (3 if kind == "msa" else 2)


def features(network: Any, x: torch.Tensor, blocks: int) -> torch.Tensor:
    return network.blocks[:blocks](network.norm_pre(network._pos_embed(network.patch_embed(x))))


@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_it_starts_as_timm_starts_blocks_and_is_no_copy_of_one(kind: str) -> None:
    torch.manual_seed(1)
    network = vit(embed_dim=96, init_values=0.1)
    torch.manual_seed(2)
    block = extra(network, kind).blocks[2]
    matrices = [p for p in block.parameters() if p.ndim > 1]
    assert len(matrices) == 2
    for matrix in matrices:
        assert 0.019 < matrix.std() < 0.021
    assert torch.equal(block.norm.weight, torch.ones_like(block.norm.weight))
    assert torch.equal(block.ls.gamma, torch.full_like(block.ls.gamma, 0.1))
    biases = [p for name, p in block.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(bias.any() for bias in biases)


def test_masks_reach_the_extra_attention() -> None:
    treated = extra(vit(), "msa")
    scrambled(treated.blocks[2])
    x, mask = images(treated), torch.eye(25, dtype=torch.bool)
    assert (treated(x, attn_mask=mask) - treated(x)).abs().max() > 1e-6
    assert extra(vit(), "mlp")(x, attn_mask=mask).shape == (2, 5)


def test_treatments_of_attention_come_after_it_and_take_it_in() -> None:
    treated = treat(vit((12, 3)), "extra_block", "local_attention")
    assert treated.blocks[2].attn.neighbourhood is treated.blocks[0].attn.neighbourhood
    with pytest.raises(TreatmentError, match="list extra_block before the treatments of attention"):
        treat(vit(), "talking_heads", "extra_block")
