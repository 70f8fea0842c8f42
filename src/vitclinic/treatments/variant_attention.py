"""Variants of timm's attention: a k x k neighbourhood, no softmax, talking heads.

A position's neighbours lie in its own row of the grid and the r = (k - 1) / 2 rows above and below. On large grids
attention therefore runs in bands: R rows of queries with the R + 2r rows of keys that hold all their neighbours, cut
from the grid by one gather, with a mask inside each. That is (R + 2r) / height of the work of a mask over all keys.

Shapes: as in `variant_attention`; P prefix tokens, which stand outside the grid, N = P + rows * columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Site, Unit
from vitclinic.treatments.surgery import check_untouched

Size = tuple[int, int]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

SHARE_OF_KEYS = 1 / 3
"""Bands are used if they hold at most this share of the grid's rows; above it (measured on a CPU) the gather costs
as much as the smaller products save."""


def neighbours(size: Size, kernel: int, prefix: int, device: torch.device | None = None) -> Tensor:
    """Return the mask [N, N] of keys each query (first axis) may see: |row|, |column| distance <= (kernel - 1) / 2.

    Windows are cut at the border of the grid. Prefix tokens see all tokens and are seen by all of them.

    Example:
        >>> neighbours((1, 4), kernel=3, prefix=1).int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    places = torch.cartesian_prod(*(torch.arange(length, device=device) for length in size))
    near = (places[:, None] - places).abs().amax(-1) <= kernel // 2
    seen = torch.ones(prefix + len(places), prefix + len(places), dtype=torch.bool, device=device)
    seen[prefix:, prefix:] = near
    return seen


class Neighbourhood(nn.Module):
    """The neighbourhood mask of one grid, shared by all attentions on that grid.

    A hook follows the size of the grid, so that networks of dynamic image size stay correct.
    """

    mask: Tensor | None
    """[N, N], or [G, Q, K] for bands; None if the window covers the whole grid."""
    keys: Tensor | None
    """The tokens of every band, [G * K]; None without bands."""

    def __init__(self, kernel: int, prefix: int, size: Size, grid_at: Site) -> None:
        super().__init__()
        self.kernel = kernel
        self.prefix = prefix
        self.size = size
        self._grid_at = grid_at
        like = next(grid_at.module.parameters(), None)
        self._build(size, None if like is None else like.device)
        # A bound method, not a closure: a copy of the network is then watched by its own neighbourhood.
        grid_at.module.register_forward_hook(self._watch)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, grid={self.size[0]} x {self.size[1]}, bands={self.bands if self.banded else 0}"

    @property
    def banded(self) -> bool:
        """True if attention runs in bands."""
        return self.keys is not None

    def restrict(self, mask: Tensor | None, x_bnc: Tensor) -> Tensor | None:
        """Combine a mask over all keys with this neighbourhood."""
        self._check(x_bnc.shape[1])
        near = neighbours(self.size, self.kernel, self.prefix, x_bnc.device) if self.banded else self.mask
        if mask is None or near is None:
            return near if mask is None else mask
        return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)

    def attend_in_bands(self, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, attend: Attend) -> Tensor:
        """Apply attention band by band, each token to its neighbours; prefix tokens see everything."""
        assert self.keys is not None  # banded
        self._check(q_bhnd.shape[2])
        batch, heads, _, width = q_bhnd.shape
        shape = (batch, heads, self.bands, -1, width)
        q_bhgqd = q_bhnd[:, :, self.prefix :].reshape(shape)
        k_bhgkd, v_bhgkd = (x_bhnd.index_select(2, self.keys).view(shape) for x_bhnd in (k_bhnd, v_bhnd))
        mixed_bhnd = attend(q_bhgqd, k_bhgkd, v_bhgkd, self.mask).flatten(2, 3)
        if self.prefix == 0:
            return mixed_bhnd
        return torch.cat((attend(q_bhnd[:, :, : self.prefix], k_bhnd, v_bhnd, None), mixed_bhnd), dim=2)

    def _check(self, tokens: int) -> None:
        if tokens != self.prefix + self.size[0] * self.size[1]:
            raise TreatmentError(
                f"local_attention saw {tokens} tokens where {self.prefix} + {self.size[0]} x {self.size[1]} fill the"
                " grid; do not drop patches or add tokens before the attention."
            )

    def _watch(self, _: nn.Module, __: Any, output: Any) -> None:
        size = self._grid_at.size_of(self._grid_at.pick(output))
        if size != self.size:
            device = self._grid_at.pick(output).device
            with torch.inference_mode(False):  # these tensors may be saved for a later backward pass
                self._build(size, device)

    def _build(self, size: Size, device: torch.device | None) -> None:
        self.size = size
        rows, columns = size
        reach = self.kernel // 2
        keys: Tensor | None = None
        mask: Tensor | None = None
        self.bands = 0
        if reach < max(size) - 1:
            mask = neighbours(size, self.kernel, self.prefix, device)
            height = max(height for height in range(1, max(self.kernel, 2)) if rows % height == 0)
            if height + 2 * reach <= SHARE_OF_KEYS * rows:
                self.bands = rows // height
                mask, keys = self._cut(mask, height, rows, columns)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("keys", keys, persistent=False)

    def _cut(self, near: Tensor, height: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return the mask and the keys of every band; a band at the border is shifted inwards, not cut."""
        reach, prefix = self.kernel // 2, torch.arange(self.prefix, device=near.device)
        last = rows - height - 2 * reach
        starts = [min(max(row - reach, 0), last) for row in range(0, rows, height)]
        band = torch.arange((height + 2 * reach) * columns, device=near.device) + self.prefix
        keys_gk = torch.stack([torch.cat((prefix, band + start * columns)) for start in starts])
        queries_gq = torch.arange(self.prefix, len(near), device=near.device).view(self.bands, -1)
        return near[queries_gq[:, :, None], keys_gk[:, None, :]], keys_gk.flatten()


class VariantAttention(nn.Module):
    """Attention built from the parts of a timm `Attention`; as long as no option is set, it computes the same values.

    `in_pieces` says that the map may be computed in bands; attention recording sets it to False while it reads maps
    (`vitclinic.anatomy.attention`).
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
            mixed_bhnd = near.attend_in_bands(q_bhnd, k_bhnd, v_bhnd, self.attend)
        else:
            mask = attn_mask if near is None else near.restrict(attn_mask, x_bnc)
            mixed_bhnd = self.attend(q_bhnd, k_bhnd, v_bhnd, mask)
        mixed_bnc = self.norm(mixed_bhnd.transpose(1, 2).flatten(2))
        if self.gate is not None:
            mixed_bnc = mixed_bnc * self.gate(x_bnc).sigmoid()
        return self.proj_drop(self.proj(mixed_bnc))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weighted sums of the values, [B, H, ..., Q, D]; `mask` is True (or 0) for keys that count."""
        if not self.softmax:
            return self._attend_by_logits(q, k, v, mask)
        if self.fused_attn and self.logits_mix is None:
            return self._attend_fused(q, k, v, mask)
        weights = attention_weights(q, k, self.scale, mask, self.logits_mix, self.weights_mix)
        return self.attn_drop(weights) @ v  # type: ignore[no-any-return]

    def _attend_fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        if q.ndim == 4:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale)
        # Fast kernels take four axes, so bands are folded into the heads.
        shape = q.shape
        if mask is not None:
            mask = mask.expand(shape[1], *mask.shape).flatten(0, 1)
        q, k, v = (part.flatten(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=self.scale).reshape(shape)

    def _attend_by_logits(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return (q k^T scale) v; without a softmax in between this equals q (k^T v), which is cheaper."""
        if mask is None and not (self.training and self.attn_drop.p > 0):
            return attend_without_softmax(q, k, v, self.scale)
        logits = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:  # an additive mask before a softmax is a factor after it
            logits = logits * (mask if mask.dtype == torch.bool else mask.exp())
        return self.attn_drop(logits) @ v  # type: ignore[no-any-return]


def attention_weights(
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    logits_mix: Tensor | None = None,
    weights_mix: Tensor | None = None,
) -> Tensor:
    """Return W softmax(L q k^T scale), where the mixes L and W over the heads are optional; `mask` as in `attend`."""
    logits = (q * scale) @ k.transpose(-2, -1)
    if logits_mix is not None:
        logits = _mix_heads(logits, logits_mix)
    if mask is not None:  # after the mix: minus infinity would spread over the heads
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(dim=-1)
    return weights if weights_mix is None else _mix_heads(weights, weights_mix)


def attend_without_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (q k^T scale) v as q (k^T v), linear in the number of tokens."""
    return (q * scale) @ (k.transpose(-2, -1) @ v)


def _mix_heads(maps: Tensor, mix: Tensor) -> Tensor:
    """Replace map h by sum_i mix[h, i] map_i; `maps` is [B, H, ..., Q, K]."""
    return torch.einsum("hi,bi...->bh...", mix, maps)


def attention_units(anatomy: Anatomy, treatment: str) -> Sequence[Unit]:
    """Return the attention units of a network.

    Raises:
        TreatmentError: One of them is neither timm's `Attention` nor a variant of it.
    """
    units = anatomy.of_kind("msa")
    for unit in units:
        if type(unit.module) not in (Attention, VariantAttention):
            raise TreatmentError(
                f"{treatment} only supports timm's Attention; that of {unit.name} is a {type(unit.module).__name__}."
                " Build the network without attn_layer, or drop the treatment that replaced it."
            )
        if type(unit.module) is Attention:
            check_untouched(treatment, unit.module, unit.name)
    return units


def variant_of(anatomy: Anatomy, unit: Unit) -> VariantAttention:
    """Return the unit's attention as a `VariantAttention`, replacing timm's in the network if necessary."""
    if isinstance(unit.module, VariantAttention):
        return unit.module
    variant = VariantAttention(unit.module)
    anatomy.network.set_submodule(anatomy.path(unit.module), variant)
    return variant
