"""Attention maps in a recorded pass: which softmax computes them, and which cells their queries and keys are.

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from vitclinic.anatomy.maps import SeenMap, arrange_map
from vitclinic.anatomy.observation.locate import Layouts, Locator
from vitclinic.anatomy.observation.places import PADDING, Places, renumber
from vitclinic.anatomy.observation.residuals import MOVES
from vitclinic.anatomy.observation.stretch import Stretch
from vitclinic.anatomy.observation.trace import NORMS, Trace, Value
from vitclinic.anatomy.sites import Layout, Size
from vitclinic.anatomy.units import AttentionSpec

_ATTENDED = 1e-30
"""A weight below this is a mask's: finite scores of a network differ by less than 69."""
_ROUNDING, _EXACT = 1e-2, 1e-4
"""How far a row's sum may be from 1, in half precision and in others."""
_PASSING = MOVES | {"expand", "native_dropout"}
_HEAD_MIXING = _PASSING | NORMS | {"mm", "addmm", "linear", "convolution", "bmm"}
"""Operations between a softmax and the product with the values: those that leave a map as it is, and those of talking
heads."""


@dataclass(frozen=True, eq=False)
class _Map:
    """Weights of queries for keys in a recorded pass.

    Args:
        value: The weights: what a softmax returns, or the operand of a matrix product.
        tensor: The numbers.
        counted: The softmax or the product, by whose number among its kind the map is found again.
        product: The product with the values.
        places: Cells of its queries and keys, told apart by what the product sums over.
        operand: Which operand of a product it is; None for a softmax.
        mixed_later: True if its heads are mixed before the product.
    """

    value: Value
    tensor: Tensor
    counted: Value
    product: Value
    places: Places
    operand: int | None = None
    mixed_later: bool = False


def find_attention(stretch: Stretch, locator: Locator) -> AttentionSpec | None:
    """Return the attention of a stretch, if softmaxes over keys, or weights that sum to 1 all the same, compute it.

    Several maps are groups of heads if they have the same queries and keys and work side by side.
    """
    maps = _find_maps(stretch)
    if not maps or _are_applied_in_turn(stretch):
        return None
    if not all(_are_side_by_side(one, other, stretch) for one in maps for other in maps):
        return None
    if not all(_have_same_cells(maps[0].places, one.places) for one in maps):
        return None  # pieces of the queries, or windows, one after the other
    call, numbers, within = locator.find_call(*(one.counted for one in maps))
    spread = [_spread(one, stretch.record.images, locator.layouts) for one in maps]
    first = spread[0]
    if first is None or not all(other is not None and _is_alike(first, other) for other in spread):
        return None
    found = replace(first, numbers=numbers, within=within, call=call.number)
    has_class = bool(maps[0].places.keys is None or locator.layouts.has_class(maps[0].places.keys))
    layout = Layout(prefix=found.prefix[1], size=found.grids[1], has_class=has_class)
    return AttentionSpec(call.module, layout, seen=found)


def _are_applied_in_turn(stretch: Stretch) -> bool:
    """Return True if weights apply to what the same weights have mixed, as in w (w v): they are not the whole map."""
    record = stretch.record
    applied = {(_behind(record, one.parent), one.product.index) for one in _applications(stretch)}
    pairs = ((one, other) for one in applied for other in applied if one != other)
    return any(one[0] == other[0] and record.depends(one[1], other[1]) for one, other in pairs)


def _find_maps(stretch: Stretch) -> list[_Map]:
    """Return the maps of a stretch: softmaxes that are applied as they are, else what is applied, else softmaxes."""
    softmaxes = [value for value in stretch.values if _is_softmax(value)]
    applied = list(_applications(stretch))
    for look_for in (_as_computed, _as_applied, _before_mixing):
        if (found := look_for(stretch, softmaxes, applied)) is not None:
            return found
    return []


@dataclass(frozen=True, eq=False)
class _Application:
    """A product that weighs values: its operand with the weights, and whether its columns are queries."""

    product: Value
    parent: int
    turned: bool

    def map_of(self, value: Value, tensor: Tensor | None, counted: Value, **fields: Any) -> _Map:
        """Return weights as a map that this product applies."""
        places = value.places
        assert places is not None  # the weights have queries and keys
        assert tensor is not None
        if self.turned:
            assert places.keys is not None
            assert places.key_grid is not None
            places = Places(places.keys, places.key_grid, places.cells, places.grid)
        return _Map(value, tensor, counted, self.product, places, **fields)


def _applications(stretch: Stretch) -> Iterator[_Application]:
    """Yield the products of a stretch that weigh values, along keys."""
    for product in stretch.values:
        for place, parent in enumerate(product.parents[:2] if product.mixing == "attention" else ()):
            places = stretch.record.values[parent].places
            if places is not None and places.keys is not None:
                axis = -1 if place == 0 else -2
                kept = [bool((part == part.narrow(axis, 0, 1)).all()) for part in (places.cells, places.keys)]
                if any(kept):
                    yield _Application(product, parent, turned=not kept[0])


def _as_computed(stretch: Stretch, softmaxes: list[Value], applied: list[_Application]) -> list[_Map] | None:
    """Return the softmaxes as maps, if each of them multiplies values: nothing is masked, mixed or added later."""
    products = {_behind(stretch.record, one.parent): one for one in applied}
    if not softmaxes or not all(value.index in products for value in softmaxes):
        return None
    return [products[value.index].map_of(value, value.tensor, value) for value in softmaxes]


def _as_applied(stretch: Stretch, softmaxes: list[Value], applied: list[_Application]) -> list[_Map] | None:
    """Return the operands of products in the network's own code as maps, if their rows sum to 1."""
    record, found = stretch.record, []
    for one in applied:
        origin, operands = _behind(record, one.parent), one.product.operands
        places = [place for place, (index, _) in enumerate(operands) if _behind(record, index) == origin]
        if not places:
            return None
        index, tensor = operands[places[0]]
        found.append(one.map_of(record.values[index], tensor, one.product, operand=places[0]))
    used = all(any(record.depends(one.value.index, value.index) for one in found) for value in softmaxes)
    return found if found and used and all(_is_distribution(one) for one in found) else None


def _before_mixing(stretch: Stretch, softmaxes: list[Value], applied: list[_Application]) -> list[_Map] | None:
    """Return the softmaxes as maps, if fixed weights mix the heads of each before it is applied (talking heads)."""
    found = []
    for value in softmaxes:
        for one in applied:
            later = stretch.record.between(value.index, one.parent)
            if later and all(_mixes_heads(other) for other in later):
                found.append(one.map_of(value, value.tensor, value, mixed_later=True))
                break
        else:
            return None
    return found or None


def _mixes_heads(value: Value) -> bool:
    """Return True for an operation that leaves a map as it is, or works on the heads of each pair of tokens."""
    bias = value.op == "add" and value.function is F.linear
    return value.mixing is None and (value.op in _HEAD_MIXING or bias)


def _behind(record: Trace, index: int) -> int:
    """Return the value that another shows in a different arrangement, repeated or after dropout."""
    value = record.values[index]
    while value.op in _PASSING and value.parents:
        value = record.values[value.parents[0]]
    return value.index


def _is_softmax(value: Value) -> bool:
    """Return True for a softmax of scores of queries and keys, called by the network's own code."""
    places = value.places
    if "softmax" not in value.op or places is None or places.keys is None or not value.numbers:
        return False
    return bool((places.keys >= 0).any())


def _is_distribution(one: _Map) -> bool:
    """Return True if the weights of each query are not negative and sum to 1; of one that sees no key, to 0."""
    axes = _tail(one.places)
    if axes is None or not bool(one.tensor.isfinite().all()):
        return False
    sums = one.tensor.sum(axes[1])
    tolerance = _ROUNDING if one.tensor.element_size() < 4 else _EXACT
    return bool((one.tensor >= 0).all()) and bool((((sums - 1).abs() < tolerance) | (sums == 0)).all())


def _have_same_cells(one: Places, other: Places) -> bool:
    """Return True if two maps are of the same queries and keys."""
    pairs = ((one.cells, other.cells), (one.keys, other.keys))
    return all(a is None or b is None or torch.equal(a, b) for a, b in pairs)


def _are_side_by_side(one: _Map, other: _Map, stretch: Stretch) -> bool:
    """Return True if what the first map gives reaches the end of the stretch without passing the second."""
    reached = {one.product.index}
    for value in stretch.values:
        if value is not other.product and not reached.isdisjoint(value.parents):
            reached.add(value.index)
    return one is other or stretch.last in reached


def _tail(places: Places) -> tuple[int, int] | None:
    """Return the axes of queries and keys, from the end; None if they cannot be told apart."""
    assert places.keys is not None  # so has a map its keys
    count = places.cells.ndim
    fixed = [
        [bool((part == part.narrow(axis, 0, 1)).all()) for axis in range(count)] for part in (places.cells, places.keys)
    ]
    queries = [axis for axis in range(count) if fixed[1][axis] and not fixed[0][axis]]
    keys = [axis for axis in range(count) if fixed[0][axis] and not fixed[1][axis]]
    if len(queries) == len(keys) == 1:
        return queries[0] - count, keys[0] - count
    return (-2, -1) if fixed[0][-1] and fixed[1][-2] else None


def _spread(one: _Map, images: int, layouts: Layouts) -> SeenMap | None:
    """Return how a map lies, without its place in the network; None if that cannot be told."""
    places, tail = one.places, _tail(one.places)
    if tail is None or places.keys is None or not _is_distribution(one):
        return None
    cells, keys, tensor = (part.movedim(tail, (-2, -1)) for part in (places.cells, places.keys, one.tensor))
    places = Places(cells, places.grid, keys, places.key_grid)
    split = _split(places, images)
    if split is None or not _is_same_everywhere(places, *split):
        return None
    splits, axes, windows = split
    described = _describe(places, *split, tensor, layouts)
    seen = SeenMap((), None, 0, splits, axes, windows, *described)
    return replace(seen, tail=tail, operand=one.operand, mixed_later=one.mixed_later)


def _is_alike(one: SeenMap, other: SeenMap) -> bool:
    """Return True if two maps have the same queries, keys and mask, and lie alike."""
    fields = ("splits", "axes", "windows", "prefix", "grids", "tail", "operand", "mixed_later")
    tensors = [
        pair
        for name in ("queries", "keys", "visible", "orders")
        for pair in zip(*(pytree.tree_leaves(getattr(seen, name)) for seen in (one, other)), strict=False)
    ]
    return all(getattr(one, name) == getattr(other, name) for name in fields) and all(
        torch.equal(*pair) if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor) else pair[0] is pair[1]
        for pair in tensors
    )


def _is_same_everywhere(
    places: Places, splits: tuple[tuple[int, ...], ...], axes: tuple[int, ...], windows: int
) -> bool:
    """Return True if all heads have the same queries and keys, and all images have them at the same cells."""
    assert places.keys is not None  # so has a map its keys
    assert places.key_grid is not None
    for cells, grid in ((places.cells, places.grid), (places.keys, places.key_grid)):
        arranged = arrange_map(cells, splits, axes, windows)
        inside = torch.where(arranged >= 0, arranged % math.prod(grid), arranged)
        by_image = inside.reshape(-1, windows, *inside.shape[1:])
        if not bool((inside == inside[:, :1]).all()) or not bool((by_image == by_image[:1]).all()):
            return False
    return True


Split = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]


def _split(places: Places, images: int) -> Split | None:
    """Return how the axes before Q and K fall into images, windows and heads; None if they cannot be told apart."""
    assert places.keys is not None  # so has a map its keys
    assert places.key_grid is not None
    keys = places.keys[..., 0, :]
    owner = keys.amax(-1) // math.prod(places.key_grid)
    splits: list[tuple[int, ...]] = []
    roles: list[str] = []
    for axis in range(keys.ndim - 1):
        length, inner = keys.shape[axis], 1
        if bool((owner != owner.narrow(axis, 0, 1)).any()):
            inner = length // images
            if not bool((owner.movedim(axis, -1) == torch.arange(length) // inner).all()):
                return None
            part = keys.narrow(axis, 0, inner)
            lengths: tuple[int, ...] = (-1,)
            roles.append("images")
        else:
            part, lengths, inner = keys, (), length
        cut = _cut(part.movedim(axis, 0).flatten(1), inner)
        if cut is None:
            return None
        for role, count in zip(("windows", "heads"), cut, strict=True):
            if count > 1:
                lengths = (*lengths, count)
                roles.append(role)
        splits.append(lengths or (1,))
        if not lengths:
            roles.append("heads")
    if roles.count("images") != 1:
        return None
    axes = tuple(index for role in ("images", "windows", "heads") for index, has in enumerate(roles) if has == role)
    lengths_of = [length for split in splits for length in split]
    return tuple(splits), axes, math.prod(lengths_of[index] for index in axes if roles[index] == "windows")


def _cut(rows: Tensor, length: int) -> tuple[int, int] | None:
    """Return the numbers of windows and heads along an axis on which windows, if any, come first."""
    windows = len(torch.unique(rows, dim=0))
    if length % windows:
        return None
    heads = length // windows
    same = rows.reshape(windows, heads, -1)
    return (windows, heads) if bool((same == same[:, :1]).all()) else None


def _describe(
    places: Places,
    splits: tuple[tuple[int, ...], ...],
    axes: tuple[int, ...],
    windows: int,
    tensor: Tensor,
    layouts: Layouts,
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[Tensor | None, Tensor | None], tuple[Size, Size], Tensor | None]:
    """Return places of queries and keys, how many are off the grid, their order, their grids and what they see."""
    assert places.keys is not None  # so has a map its keys
    assert places.key_grid is not None
    queries = arrange_map(places.cells, splits, axes, windows)[:windows, 0, :, 0]
    keys = arrange_map(places.keys, splits, axes, windows)[:windows, 0, 0]
    spread = [renumber(Places(queries, places.grid)), renumber(Places(keys, places.key_grid))]
    grids = (spread[0].grid, spread[1].grid)
    parts = [_positions(part.cells, part.grid, layouts) for part in spread]
    orders = (parts[0][2], parts[1][2])
    weights = arrange_map(tensor, splits, axes, windows)
    attended = weights.reshape(-1, windows, *weights.shape[1:]) > _ATTENDED
    # A mask is the same for all images and heads; weights that vanish for some of them only are the attention's own.
    masked = torch.equal(attended.any(2).any(0), attended.all(2).all(0))
    seen = attended.any(2).any(0) if masked else torch.ones_like(attended[0, :, 0])
    for axis, order in zip((-2, -1), orders, strict=True):
        seen = seen if order is None else seen.index_select(axis, order)
    return parts[0][0], parts[1][0], (parts[0][1], parts[1][1]), orders, grids, None if bool(seen.all()) else seen


def _positions(cells: Tensor, grid: Size, layouts: Layouts) -> tuple[Tensor, int, Tensor | None]:
    """Return (row, column) of the spatial tokens of each window, how many others there are, and the order of all."""
    off = ((cells < 0) & (cells != PADDING)).all(0)
    prefix = int(off.sum())
    ordered = layouts.in_order(torch.where(off, cells[0], 0))
    order = None if torch.equal(ordered, torch.arange(len(ordered))) else ordered
    spatial = (cells if order is None else cells[:, order])[:, prefix:]
    inside = spatial % math.prod(grid)
    positions = torch.stack((inside // grid[1], inside % grid[1]), -1)
    return torch.where(spatial[..., None] >= 0, positions, -1), prefix, order
