"""Whether a recorded map is the one that the network applies: map x V against what the network itself computed.

Shapes: B batch (times windows), H heads, Q queries, K keys, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vitclinic.anatomy import AttentionMap
from vitclinic.anatomy.forward import is_looking
from vitclinic.anatomy.maps import MHA_SIGNATURE, PRODUCTS, SeenMap, arrange_map, join_heads, project_heads

APPLYING = PRODUCTS | {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.baddbmm}


@dataclass(frozen=True)
class _Call:
    """One function that may apply a map."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    def applies(self, expected: AttentionMap, tolerance: float) -> bool:
        """Tell whether the call computed what the map says."""
        if self.func is F.scaled_dot_product_attention:
            return self._is_attention(expected, tolerance)
        if self.func is F.multi_head_attention_forward:
            return self._is_multi_head(expected, tolerance)
        operands = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        return any(_is_map(operand, expected, tolerance) for operand in operands)

    def _is_attention(self, expected: AttentionMap, tolerance: float) -> bool:
        bound = dict(zip(("query", "key", "value"), self.args, strict=False)) | dict(self.kwargs)
        query, value = bound["query"], bound["value"]
        if bound.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        try:
            values, result = (_arrange(x, expected.seen, side) for x, side in ((value, 1), (self.result, 0)))
            product = expected.weights @ values
        except RuntimeError:  # another attention, of other lengths
            return False
        return _equal(product, result, tolerance)

    def _is_multi_head(self, expected: AttentionMap, tolerance: float) -> bool:
        bound = MHA_SIGNATURE.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        call = bound.arguments
        _, _, values = project_heads(call, [call[name] for name in ("query", "key", "value")])
        try:
            weights = expected.weights if expected.seen is None else _undo_orders(expected.weights, expected.seen)
            product = join_heads(weights @ values, call)
        except RuntimeError:
            return False
        return _equal(product, self.result[0], tolerance)


def _arrange(x: Tensor, seen: SeenMap | None, side: int) -> Tensor:
    """Return queries' results (side 0) or values (side 1), [..., N, D], on the axes of a recorded map."""
    if seen is None:
        return x
    arranged = arrange_map(x, seen.splits, seen.axes, seen.windows)
    order = seen.orders[side]
    return arranged if order is None else arranged.index_select(-2, order)


def _undo_orders(weights: Tensor, seen: SeenMap) -> Tensor:
    for axis, order in zip((-2, -1), seen.orders, strict=True):
        weights = weights if order is None else weights.index_select(axis, order.argsort())
    return weights


def _is_map(operand: Tensor, expected: AttentionMap, tolerance: float) -> bool:
    """Tell whether an operand is the map, or one of its groups of heads."""
    try:
        arranged = operand if expected.seen is None else expected.seen.arrange(operand)
    except (RuntimeError, IndexError):
        return False
    if arranged.ndim != 4:
        return False
    groups = 1 if expected.seen is None else len(expected.seen.numbers)
    return any(_equal(arranged, group, tolerance) for group in expected.weights.chunk(groups, dim=1))


def _equal(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    same = actual.shape == expected.shape
    return same and bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


class Products(TorchFunctionMode):
    """Function mode that keeps all that may have applied a map, and the maps that were recorded meanwhile.

    Enter it before `record_attention(units, products.expect)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.row_sums: dict[str, Tensor] = {}
        self._calls: list[_Call] = []
        self._maps: list[AttentionMap] = []

    def expect(self, seen: AttentionMap) -> None:
        """Take a recorded map."""
        self.row_sums[seen.unit.name] = seen.weights.sum(-1)
        weights = seen.weights.clone()
        self._maps.append(AttentionMap(seen.unit, weights, seen.prefix, seen.grid, seen.windows))

    def unapplied(self, tolerance: float) -> list[str]:
        """Return the names of the units whose map times V is nothing that the network computed."""
        return [
            recorded.unit.name
            for recorded in self._maps
            if not any(call.applies(recorded, tolerance) for call in self._calls)
        ]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in APPLYING and not is_looking():
            self._calls.append(_Call(func, args, kwargs, result))
        return result
