"""Editing the map of an attention, whatever its class: another mask, no softmax, mixed heads, a uniform head.

The forward of an edited module runs under a torch function mode, which replaces the arithmetic of the map where it is
computed: in `scaled_dot_product_attention`, in `multi_head_attention_forward`, or in a softmax over the last axis. The
module keeps its class, its weights and their names. What the edit is stands in attributes of the module
(`AttentionOptions`), next to its own; as long as none is set, the module computes what it did.

Shapes: B batch (times windows), H heads, Q queries, K keys, D channels of a head; bands add an axis before Q.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import AttentionSpec
from vitclinic.anatomy.maps import (
    MHA_SIGNATURE,
    PRODUCTS,
    SOFTMAX,
    AttentionCall,
    attention_scores,
    is_over_last_axis,
    join_heads,
    project_heads,
)
from vitclinic.treatments.neighbourhood import Neighbourhood, Seams, SeenNeighbourhood, SeenPairs

Mode = Callable[[nn.Module], TorchFunctionMode]


def run_under(mode: Mode, module: nn.Module) -> None:
    """Let every call of `module.forward` run inside `mode(module)`, also in copies of the network.

    The module keeps its class, its children and its weights' names. Modes entered around the call, such as those that
    record attention, see what this mode calls.

    Args:
        mode: Function from the module to a new mode; a class, not a closure, so that a copied network has its own.
        module: The module.
    """
    own = vars(module).get("forward")  # another mode's, or a user's
    module.forward = partial(_forward, mode, module, own)


def _forward(mode: Mode, module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    with mode(module):
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


class AttentionOptions(Protocol):
    """The attributes of an edited attention module; `edit_attention` adds them."""

    map_heads: int
    map_spec: AttentionSpec | None
    """The attention before it was edited; kept for when there is no map to see any more."""
    neighbourhood: Neighbourhood | SeenNeighbourhood | None
    seams: Seams | SeenPairs | None
    """Set where a mask of finite numbers stands for what may not be seen."""
    logits_mix: nn.Parameter | None
    weights_mix: nn.Parameter | None
    softmax_free: bool
    """Read by the anatomy: such an attention has no map."""
    uniform_head: bool
    """The last head gives the mean over what it may see."""
    in_pieces: bool
    """The map may be computed in bands; attention recording sets it to False (`vitclinic.anatomy.attention`)."""


def edit_attention(module: nn.Module, heads: int, spec: AttentionSpec | None = None) -> AttentionOptions:
    """Put the forward of an attention module under the edit, if it is not yet, and return the module to set options."""
    if not is_edited(module):
        fields: Any = module
        fields.map_heads, fields.map_spec = heads, spec
        fields.neighbourhood = fields.seams = None
        module.register_parameter("logits_mix", None)
        module.register_parameter("weights_mix", None)
        fields.softmax_free = fields.uniform_head = False
        fields.in_pieces = True
        run_under(_Edit, module)
    return cast(AttentionOptions, module)


def is_edited(module: nn.Module | None) -> bool:
    """Return True if the module's attention has been edited."""
    return hasattr(module, "softmax_free")


class _Edit(TorchFunctionMode):
    """Function mode of one call of an attention module. What it calls is seen by the modes around it (recording)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.attention = cast(AttentionOptions, module)
        self._map: Tensor | None = None
        """The edited map, if the network goes on to mix its heads: a key that is hidden stays hidden in the mixture."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend_sdpa(self.attention, AttentionCall(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            return _attend_multi_head(self.attention, *args, **kwargs)
        if is_softmax_of_map(func, args, kwargs):
            weights = _edit_softmax(self.attention, *args, **kwargs)
            self._map = weights if _is_mixed_later(self.attention) else None
            return weights
        if self._map is not None and func in PRODUCTS:
            args = tuple(_hide_again(operand, self._map) for operand in args)
        return func(*args, **kwargs)


def _is_mixed_later(attention: AttentionOptions) -> bool:
    seen = None if attention.map_spec is None else attention.map_spec.seen
    return attention.neighbourhood is not None and seen is not None and seen.mixed_later


def _hide_again(operand: Any, weights: Tensor) -> Any:
    """Return a map without the keys to which no head of another map of its shape gives weight."""
    if not isinstance(operand, Tensor) or operand.shape != weights.shape:
        return operand
    return operand.masked_fill((weights == 0).all(dim=1, keepdim=True), 0.0)


def is_softmax_of_map(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a softmax over the last axis of scores, [B, H, Q, K], [B * H, Q, K] or [B, W, H, Q, K]."""
    if func not in SOFTMAX:
        return False
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores.ndim in (3, 4, 5) and is_over_last_axis(scores, args, kwargs)


def _edit_softmax(attention: AttentionOptions, input: Tensor, dim: int, *_: Any, **kwargs: Any) -> Tensor:
    """Return the edited weights of a plain softmax over scores [B, H, Q, K], or [B * H, Q, K] with heads fastest."""
    if input.ndim == 5:  # windows have an axis of their own
        return _edit_softmax(attention, input.flatten(0, 1), dim, **kwargs).reshape(input.shape)
    scores = _heads_apart(input, attention.map_heads) if input.ndim == 3 else input
    scores = scores if kwargs.get("dtype") is None else scores.to(kwargs["dtype"])
    near = attention.neighbourhood
    seen = None if near is None else near.near(len(scores), scores.shape[-2], scores.shape[-1], scores.device)
    hidden = None if _only_masked(attention) else scores == -torch.inf
    if seen is not None:
        hidden = ~seen if hidden is None else hidden | ~seen
    weights = edit_weights(attention, scores, hidden)
    return weights.flatten(0, 1) if input.ndim == 3 else weights


def _attend_sdpa(attention: AttentionOptions, call: AttentionCall) -> Tensor:
    query, key, value = call[:3]
    if query.ndim == 3:
        query, key, value = (_heads_apart(x, attention.map_heads) for x in (query, key, value))
        return _attend_sdpa(attention, call._replace(query=query, key=key, value=value)).flatten(0, 1)
    mask = call.attn_mask
    if query.ndim == 5:  # windows have an axis of their own
        windows = query.shape[1]
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        mask = mask.flatten(0, 1) if mask is not None and mask.ndim == 5 else mask
        mixed = _attend_sdpa(attention, call._replace(query=query, key=key, value=value, attn_mask=mask))
        return mixed.reshape(-1, windows, *mixed.shape[1:])
    call = call.repeat_groups()
    query, key, value, mask = *call[:3], call.mask
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    near = attention.neighbourhood
    weigh = partial(_weigh, attention, dropout=call.dropout_p, scale=scale)
    whole = mask is None and query.shape == key.shape
    if isinstance(near, Neighbourhood) and near.banded and attention.in_pieces and whole:
        return near.attend_in_bands(query, key, value, weigh)
    return weigh(query, key, value, _restrict(attention, mask, query, key))


def _restrict(attention: AttentionOptions, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Combine a mask over all keys with the neighbourhood."""
    near = attention.neighbourhood
    seen = None if near is None else near.near(len(query), query.shape[-2], key.shape[-2], query.device)
    if mask is None or seen is None:
        return seen if mask is None else mask
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _weigh(
    attention: AttentionOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
) -> Tensor:
    """Return the weighted sums of the values, [B, H, ..., Q, D]; `mask` is True (or 0) for keys that count."""
    if _only_masked(attention):
        return _attend_fused(q, k, v, mask, dropout, scale)
    if attention.softmax_free and mask is None and not dropout:
        return attend_without_softmax(q, k, v, scale)
    weights = edit_weights(attention, *attention_scores(q, k, scale, mask))
    return (F.dropout(weights, dropout) if dropout else weights) @ v


def _only_masked(attention: AttentionOptions) -> bool:
    return attention.logits_mix is None and not attention.softmax_free and not attention.uniform_head


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    if q.ndim == 4:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    # Fast kernels take four axes, so bands are folded into the heads.
    shape = q.shape
    if mask is not None:
        mask = mask.expand(shape[1], *mask.shape).flatten(0, 1)
    q, k, v = (part.flatten(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale).reshape(shape)


def _attend_multi_head(attention: AttentionOptions, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `multi_head_attention_forward` with the edited map; tokens come first, [Q, B, C] or [Q, C]."""
    bound = MHA_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    extras = [name for name in ("bias_k", "bias_v", "static_k", "static_v") if call[name] is not None]
    if extras or call["add_zero_attn"]:
        raise TreatmentError("A MultiheadAttention with keys of its own (add_bias_kv, add_zero_attn) cannot be edited.")
    batched = call["query"].ndim == 3
    tokens = [call[name] if batched else call[name].unsqueeze(1) for name in ("query", "key", "value")]
    q, k, v = project_heads(call, tokens)
    mask = _restrict(attention, _mask_of(call, batched), q, k)
    dropout = call["dropout_p"] if call["training"] else 0.0
    weights: Tensor | None = None
    if call["need_weights"]:
        weights = edit_weights(attention, *attention_scores(q, k, mask=mask))
        mixed = (F.dropout(weights, dropout) if dropout else weights) @ v
        weights = weights.mean(dim=1) if call["average_attn_weights"] else weights
        weights = weights if batched else weights.squeeze(0)
    else:
        mixed = _attend_sdpa(attention, AttentionCall(q, k, v, _mask_of(call, batched), dropout))
    out = join_heads(mixed, call)
    return (out if batched else out.squeeze(1)), weights


def _heads_apart(x_bnd: Tensor, heads: int) -> Tensor:
    """Return [B, H, N, D] of [B * H, N, D], where the heads run fastest."""
    return x_bnd.reshape(-1, heads, *x_bnd.shape[1:])


def _mask_of(call: dict[str, Any], batched: bool) -> Tensor | None:
    """Return masks of pairs and of padded keys as one that is added, [Q, K] or [B, H or 1, Q or 1, K]."""
    masks = []
    if (pairs := call["attn_mask"]) is not None:
        added = _added(pairs, call["query"])
        masks.append(added if added.ndim == 2 else _heads_apart(added, call["num_heads"]))
    if (padded := call["key_padding_mask"]) is not None:
        masks.append(_added(padded if batched else padded[None], call["query"])[:, None, None])
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is True for what may not be seen, as PyTorch's module has it, as numbers to add."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def edit_weights(attention: AttentionOptions, scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the weights [B, H, ..., Q, K] that the values get, from scores, and where a key is hidden from a query."""
    apart = None if attention.seams is None else attention.seams.of_batch(len(scores))
    if attention.softmax_free:
        for mask in (hidden, apart):
            scores = scores if mask is None else scores.masked_fill(mask, 0.0)
        return scores
    if attention.uniform_head:
        level = torch.zeros_like(scores[:, -1:])
        scores = torch.cat((scores[:, :-1], level if apart is None else level.masked_fill(apart, -torch.inf)), dim=1)
    return _mixed_softmax(scores, hidden, attention.logits_mix, attention.weights_mix)


def _mixed_softmax(
    scores: Tensor, hidden: Tensor | None, logits_mix: Tensor | None, weights_mix: Tensor | None
) -> Tensor:
    """Return W softmax(L scores); hidden keys are left out between L and the softmax."""
    if logits_mix is not None:
        # Minus infinity would spread over the heads, and 0 times it is not a number.
        scores = _mix_heads(scores if hidden is None else scores.masked_fill(hidden, 0.0), logits_mix)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights if weights_mix is None else _mix_heads(weights, weights_mix)


def _mix_heads(maps: Tensor, mix: Tensor) -> Tensor:
    """Replace map h by sum_i mix[h, i] map_i; `maps` is [B, H, ..., Q, K]."""
    # Some libraries compute their softmax in float32, whatever the network's precision.
    return torch.einsum("hi,bi...->bh...", mix.to(maps.dtype), maps)


def attention_weights(
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    logits_mix: Tensor | None = None,
    weights_mix: Tensor | None = None,
) -> Tensor:
    """Return W softmax(L q k^T scale), where the mixes L and W over the heads are optional; `mask` as in `_weigh`."""
    return _mixed_softmax(*attention_scores(q, k, scale, mask), logits_mix, weights_mix)


def attend_without_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (q k^T scale) v as q (k^T v), linear in the number of tokens."""
    return (q * scale) @ (k.transpose(-2, -1) @ v)
