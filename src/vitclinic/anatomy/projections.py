"""Queries, keys and values of torch's attention functions, so that attention can be computed from its map.

Shapes: B images, H heads, N tokens, D channels of a head, E = H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vitclinic._core.errors import NoAttentionMapError


def repeat_groups(x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values of grouped queries, repeated for each of their heads."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3)


def project_heads(call: Mapping[str, Any], unit: str) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return queries, keys and values [B, H, N, D] of `multi_head_attention_forward`, and its output projection."""
    extras = ("attn_mask", "key_padding_mask", "bias_k", "bias_v", "static_k", "static_v")
    if given := [name for name in extras if call[name] is not None] or ["add_zero_attn"] * call["add_zero_attn"]:
        raise NoAttentionMapError(f"the attention of {unit} has {given[0]}, through which maps have no gradients yet.")
    separate = [call[f"{name}_proj_weight"] for name in "qkv"]
    weights = separate if call["use_separate_proj_weight"] else call["in_proj_weight"].chunk(3)
    biases = [None] * 3 if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    given_nbe = (call["query"], call["key"], call["value"])
    projected = [F.linear(x, w, b) for x, w, b in zip(given_nbe, weights, biases, strict=True)]
    query, key, value = (x.view(*x.shape[:2], call["num_heads"], -1).permute(1, 2, 0, 3) for x in projected)
    return query, key, value, lambda x: F.linear(x, call["out_proj_weight"], call["out_proj_bias"])
