"""timm's attention with another middle: the one class that the treatments of attention share.

Between the projections (qkv, norms, dropout, gate, proj: all timm's own, under timm's names) a map is applied to
the values. Three independent changes to it, each made by a treatment and free to meet another one:

- `neighbourhood`: only keys nearby count (`local_attention`);
- `logits_mix`, `weights_mix`: learned mixes of the heads, before and behind the softmax (`talking_heads`);
- `softmax = False`: the logits themselves are the weights (`no_softmax`).

Shapes: B batch, H heads, N tokens, D width of a head, G bands of the grid, Q queries and K keys of a call.
Tensors with a band axis are [B, H, G, Q, D]; the axes between H and Q are written as `...` here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.anatomy import Anatomy, Unit
from vitclinic.errors import TreatmentError
from vitclinic.treatments.neighbourhood import Neighbourhood
from vitclinic.treatments.surgery import check_untouched


class VariantAttention(nn.Module):
    """Attention made of the parts of one of timm's; without a change it computes the same values.

    A module that computes its map in pieces says so by `in_pieces`; attention recording sets it to False for as
    long as it looks (`vitclinic.anatomy.recording`).
    """

    neighbourhood: Neighbourhood | None
    logits_mix: nn.Parameter | None
    weights_mix: nn.Parameter | None

    def __init__(self, original: Attention) -> None:
        super().__init__()
        self.num_heads: int = original.num_heads
        self.head_dim: int = original.head_dim
        self.attn_dim: int = original.attn_dim
        self.scale: float = original.scale
        self.fused_attn: bool = original.fused_attn
        self.softmax = True
        self.in_pieces = True
        self.qkv: nn.Module = original.qkv
        self.q_norm: nn.Module = original.q_norm
        self.k_norm: nn.Module = original.k_norm
        self.attn_drop: nn.Dropout = original.attn_drop
        self.norm: nn.Module = original.norm
        self.gate: nn.Module | None = original.gate
        self.proj: nn.Module = original.proj
        self.proj_drop: nn.Module = original.proj_drop
        self.neighbourhood = None
        self.register_parameter("logits_mix", None)
        self.register_parameter("weights_mix", None)
        self.train(original.training)

    def forward(self, x_bnc: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        qkv = self.qkv(x_bnc).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q_bhnd, k_bhnd, v_bhnd = qkv.unbind(0)
        q_bhnd, k_bhnd = self.q_norm(q_bhnd), self.k_norm(k_bhnd)
        if is_causal:
            tokens = x_bnc.shape[1]
            attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x_bnc.device).tril()
        near = self.neighbourhood
        if near is not None and near.banded and self.in_pieces and attn_mask is None:
            mixed_bhnd = near.in_bands(q_bhnd, k_bhnd, v_bhnd, self.mixed)
        else:
            mask = attn_mask if near is None else near.restricting(attn_mask, x_bnc)
            mixed_bhnd = self.mixed(q_bhnd, k_bhnd, v_bhnd, mask)
        mixed_bnc = self.norm(mixed_bhnd.transpose(1, 2).flatten(2))
        if self.gate is not None:
            mixed_bnc = mixed_bnc * self.gate(x_bnc).sigmoid()
        return self.proj_drop(self.proj(mixed_bnc))  # type: ignore[no-any-return]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The weighted sums of the values, [B, H, ..., Q, D]; `mask` is True, or 0, where a key counts."""
        if not self.softmax:
            return self._by_logits(q, k, v, mask)
        if self.fused_attn and self.logits_mix is None:
            return self._fused(q, k, v, mask)
        logits = (q * self.scale) @ k.transpose(-2, -1)
        if self.logits_mix is not None:
            logits = _mixed_heads(logits, self.logits_mix)
        if mask is not None:  # behind the mix: minus infinity would spread over the heads
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(dim=-1)
        if self.weights_mix is not None:
            weights = _mixed_heads(weights, self.weights_mix)
        return self.attn_drop(weights) @ v  # type: ignore[no-any-return]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        if q.ndim == 4:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale)
        # Fast kernels take four axes: bands stand beside the heads.
        shape = q.shape
        if mask is not None:
            mask = mask.expand(shape[1], *mask.shape).flatten(0, 1)
        q, k, v = (part.flatten(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale).reshape(shape)

    def _by_logits(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(q k^T scale) v: without a softmax nothing stands between the products, so that q (k^T v) is the same."""
        q = q * self.scale
        if mask is None and not (self.training and self.attn_drop.p > 0):
            return q @ (k.transpose(-2, -1) @ v)
        logits = q @ k.transpose(-2, -1)
        if mask is not None:  # a mask that is added before a softmax multiplies behind it
            logits = logits * (mask if mask.dtype == torch.bool else mask.exp())
        return self.attn_drop(logits) @ v  # type: ignore[no-any-return]


def _mixed_heads(maps: Tensor, mix: Tensor) -> Tensor:
    """Map h becomes sum_i mix[h, i] map i; `maps` is [B, H, ..., Q, K]."""
    return torch.einsum("hi,bi...->bh...", mix, maps)


def attention_units(anatomy: Anatomy, treatment: str) -> Sequence[Unit]:
    """The attention units of a network, all of them timm's own attention or a variant of it, or an error."""
    units = anatomy.of_kind("msa")
    for unit in units:
        if type(unit.module) not in (Attention, VariantAttention):
            raise TreatmentError(
                f"{treatment} knows timm's Attention; that of {unit.name} is a {type(unit.module).__name__}:"
                " build the network without attn_layer, or leave out the treatment that replaced it."
            )
        if type(unit.module) is Attention:
            check_untouched(treatment, unit.module, unit.name)
    return units


def variant_of(anatomy: Anatomy, unit: Unit) -> VariantAttention:
    """The unit's attention as a variant, put into the network in place of timm's if it is not there yet."""
    if isinstance(unit.module, VariantAttention):
        return unit.module
    variant = VariantAttention(unit.module)
    anatomy.network.set_submodule(anatomy.path(unit.module), variant)
    return variant
