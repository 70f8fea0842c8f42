"""What the tests of the treatments of attention share: small networks, and attention written out."""

from __future__ import annotations

import itertools
from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.anatomy.networks import shaken, tiny_vit


def vit(grid: tuple[int, int] = (4, 6), **keywords: Any) -> nn.Module:
    """timm's ViT on a grid of that size, at ordinary values, in float64."""
    torch.manual_seed(0)
    size = (grid[0] * 4, grid[1] * 4)
    return shaken(tiny_vit(img_size=size, patch_size=4, **keywords)).double().eval()


def pit(**keywords: Any) -> nn.Module:
    """timm's PiT in float64: grids of 15, 8 and 4."""
    torch.manual_seed(0)
    small = {
        "img_size": 64,
        "patch_size": 8,
        "stride": 4,
        "base_dims": (8, 8, 8),
        "depth": (1, 1, 1),
        "heads": (2, 2, 2),
    }
    return shaken(timm.models.PoolingVisionTransformer(num_classes=5, **(small | keywords))).double().eval()


def images(network: nn.Module, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *network.patch_embed.img_size, dtype=torch.float64, generator=generator)


def allowed_pairs(grid: tuple[int, int], kernel: int, prefix: int) -> Tensor:
    """Which query sees which key, pair by pair."""
    places: list[tuple[int, int] | None] = [None] * prefix
    places += list(itertools.product(range(grid[0]), range(grid[1])))

    def sees(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
        if one is None or other is None:
            return True
        return abs(one[0] - other[0]) <= kernel // 2 and abs(one[1] - other[1]) <= kernel // 2

    return torch.tensor([[sees(one, other) for other in places] for one in places])


def heads_of(attention: Any, x_bnc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of timm's attention, [B, H, N, D] each."""
    three = attention.qkv(x_bnc).reshape(*x_bnc.shape[:2], 3, attention.num_heads, -1)
    q, k, v = (three[:, :, part].transpose(1, 2) for part in range(3))
    return attention.q_norm(q), attention.k_norm(k), v


def joined(attention: Any, x_bnc: Tensor, mixed_bhnd: Tensor) -> Tensor:
    """From the heads' sums to the output of timm's attention."""
    mixed_bnc = attention.norm(torch.cat(mixed_bhnd.unbind(1), dim=-1))
    if attention.gate is not None:
        mixed_bnc = mixed_bnc * torch.sigmoid(attention.gate(x_bnc))
    return attention.proj(mixed_bnc)


def masked_softmax_attention(attention: Any, x_bnc: Tensor, allowed: Tensor, added: float | Tensor = 0.0) -> Tensor:
    """Attention with weights exp(logit) over the keys that are allowed, divided by their sum."""
    q, k, v = heads_of(attention, x_bnc)
    powers = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5 + added) * allowed
    weights = powers / powers.sum(-1, keepdim=True)
    return joined(attention, x_bnc, torch.einsum("bhqk,bhkd->bhqd", weights, v))
