"""An attention layer's output before its projection, from a recorded map and the layer's own weights.

Shapes: G groups (batch times windows), N tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy import AttentionMap


def output_from_map(seen: AttentionMap, forward: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """(map x V, what the module itself computed), before the projection or, where that is fused, after it."""
    module: Any = seen.unit.attention.module
    caught: dict[str, Tensor] = {}

    def catch_ends(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        caught["input"] = args[0].detach()
        caught["output"] = (output if isinstance(output, Tensor) else output[0]).detach()

    def catch_projected(_: nn.Module, args: tuple[Any, ...]) -> None:
        caught["projected"] = args[0].detach()

    projection = _projection(module)
    # timm may normalise between the two; what enters that norm is the product.
    before = module.norm if isinstance(getattr(module, "norm", None), nn.Module) else projection
    handles = [module.register_forward_hook(catch_ends), before.register_forward_pre_hook(catch_projected)]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()

    with torch.no_grad():
        tokens = caught["input"]
        on_grid = tokens.ndim == 4
        windows = _to_windows(tokens, seen) if on_grid else tokens
        weight, bias = _value_weights(module)
        values_gnhd = nn.functional.linear(windows, weight, bias).unflatten(-1, (seen.weights.shape[1], -1))
        product = torch.einsum("ghqk,gkhd->gqhd", seen.weights, values_gnhd).flatten(2)
        if "projected" in caught:
            return product, caught["projected"].reshape(product.shape)
        product = projection(product)
        return (_from_windows(product, seen, tokens) if on_grid else product), caught["output"]


def _projection(module: Any) -> nn.Module:
    if hasattr(module, "output"):  # transformers 4
        return module.output.dense
    names = ("proj", "o_proj", "out_proj")
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _value_weights(module: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight.chunk(3)[2], module.in_proj_bias.chunk(3)[2]
    if hasattr(module, "output"):
        layer = module.attention.value if hasattr(module, "attention") else module.self.value
        return layer.weight, layer.bias
    if hasattr(module, "v_proj"):
        return module.v_proj.weight, module.v_proj.bias
    layer, parts = (module.kv, 2) if hasattr(module, "kv") else (module.qkv, 3)
    bias = getattr(module, "v_bias", None)
    if bias is None and layer.bias is not None:
        bias = layer.bias.chunk(parts)[-1]
    return layer.weight.chunk(parts)[-1], bias


def _to_windows(x_bhwc: Tensor, seen: AttentionMap) -> Tensor:
    """[B, H, W, C] cut into [B * windows, tokens, C] by the recorded positions; padding is zero."""
    places = seen.positions()
    rows, columns = places.unbind(-1)
    x = x_bhwc[:, rows, columns] * (rows >= 0)[..., None]
    return x.flatten(0, 1)


def _from_windows(x_gnc: Tensor, seen: AttentionMap, like_bhwc: Tensor) -> Tensor:
    places = seen.positions()
    x_bwnc = x_gnc.unflatten(0, (len(like_bhwc), -1))
    out = torch.zeros_like(like_bhwc)
    real = places[..., 0] >= 0
    rows, columns = places[real].unbind(-1)
    out[:, rows, columns] = x_bwnc[:, real]
    return out
