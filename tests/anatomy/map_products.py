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

    def applies(self, weights: Tensor, seen: SeenMap | None, tolerance: float) -> bool:
        """Tell whether the call computed what a map, or one group of its heads, says."""
        try:
            if self.func is F.scaled_dot_product_attention:
                return self._is_attention(weights, seen, tolerance)
            if self.func is F.multi_head_attention_forward:
                return self._is_multi_head(weights, seen, tolerance)
            operands = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
            # V^T x map^T is map x V, too.
            sides = [side for operand in operands if operand.ndim > 2 for side in (operand, operand.transpose(-2, -1))]
            return any(_is_map(side, weights, seen, tolerance) for side in sides)
        except (RuntimeError, IndexError):  # another attention, of other lengths
            return False

    def _is_attention(self, weights: Tensor, seen: SeenMap | None, tolerance: float) -> bool:
        bound = dict(zip(("query", "key", "value"), self.args, strict=False)) | dict(self.kwargs)
        query, value = bound["query"], bound["value"]
        if bound.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        value = value.expand(*query.shape[:-2], *value.shape[-2:])  # all heads may share one
        values, result = (_arrange(x, seen, side) for x, side in ((value, 1), (self.result, 0)))
        return _equal(weights @ values, result, tolerance)

    def _is_multi_head(self, weights: Tensor, seen: SeenMap | None, tolerance: float) -> bool:
        bound = MHA_SIGNATURE.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        call = bound.arguments
        _, _, values = project_heads(call, [call[name] for name in ("query", "key", "value")])
        if seen is not None:
            weights = _undo_orders(weights, seen)
        return _equal(join_heads(weights @ values, call), self.result[0], tolerance)


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


def _is_map(operand: Tensor, weights: Tensor, seen: SeenMap | None, tolerance: float) -> bool:
    arranged = operand if seen is None else seen.arrange(operand)
    if arranged.shape != weights.shape:
        return False
    return (
        _is_mixture(arranged, weights, tolerance) if seen and seen.mixed_later else _equal(arranged, weights, tolerance)
    )


def _is_mixture(mixed: Tensor, weights: Tensor, tolerance: float) -> bool:
    """Tell whether each head of a map is one linear function, for all pairs, of the heads of another."""
    heads = [x.double().transpose(0, 1).flatten(1).T for x in (weights, mixed)]
    known = torch.cat((heads[0], torch.ones_like(heads[0][:, :1])), dim=1)
    fit = torch.linalg.lstsq(known, heads[1]).solution
    return len(known) > 2 * known.shape[1] and _equal(known @ fit, heads[1], tolerance)


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
        return [recorded.unit.name for recorded in self._maps if not self._is_applied(recorded, tolerance)]

    def _is_applied(self, recorded: AttentionMap, tolerance: float) -> bool:
        groups = 1 if recorded.seen is None else len(recorded.seen.numbers)
        return all(
            any(call.applies(weights, recorded.seen, tolerance) for call in self._calls)
            for weights in recorded.weights.chunk(groups, dim=1)
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in APPLYING and not is_looking():
            self._calls.append(_Call(func, args, kwargs, result))
        return result
