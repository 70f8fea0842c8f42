"""Attention maps in a recorded pass: which softmax computes them, and which cells their queries and keys are.

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitclinic.anatomy.maps import SeenMap, arrange_map
from vitclinic.anatomy.observation.locate import Locator
from vitclinic.anatomy.observation.places import PADDING, Places, renumber
from vitclinic.anatomy.observation.residuals import MOVES, Stretch
from vitclinic.anatomy.observation.trace import Trace, Value
from vitclinic.anatomy.sites import Layout, Size
from vitclinic.anatomy.units import AttentionSpec

_ATTENDED = 1e-30
"""A weight below this is a mask's: finite scores of a network differ by less than 69."""


def find_attention(stretch: Stretch, locator: Locator) -> AttentionSpec | None:
    """Return the attention of a stretch, if one softmax over keys computes it."""
    maps = [value for value in stretch.values if _is_map(value)]
    if len(maps) != 1:
        return None
    (value,) = maps
    places = value.places
    assert places is not None  # a map has them
    call, number, within = locator.find_call(value)
    split = _split(places, stretch.record.images)
    if split is None:
        return None
    splits, axes, windows = split
    if not _is_applied(value, stretch) or not _is_same_everywhere(places, splits, axes, windows):
        return None
    seen = SeenMap(number, within, call.number, splits, axes, windows, *_describe(places, splits, axes, windows, value))
    layout = Layout(prefix=seen.prefix[1], size=seen.grids[1])
    return AttentionSpec(call.module, layout, seen=seen)


def _is_applied(value: Value, stretch: Stretch) -> bool:
    """Return True if the map itself multiplies the values, along its keys: nothing is masked, mixed or added later."""
    for product in stretch.values:
        if product.mixing == "attention":
            for place, parent in enumerate(product.parents[:2]):
                if _behind(stretch.record, parent) == value.index:
                    cells = stretch.record.values[parent].places
                    assert cells is not None  # so has what comes of it
                    axis = -1 if place == 0 else -2
                    return bool((cells.cells == cells.cells.narrow(axis, 0, 1)).all())
    return False


def _behind(record: Trace, index: int) -> int:
    """Return the value that another shows in a different arrangement, repeated or after dropout."""
    value = record.values[index]
    while value.op in MOVES | {"expand", "native_dropout"} and value.parents:
        value = record.values[value.parents[0]]
    return value.index


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


def _is_map(value: Value) -> bool:
    """Return True for a softmax over the keys of each query, called by the network's own code."""
    places = value.places
    if "softmax" not in value.op or places is None or places.keys is None or not value.numbers:
        return False
    return bool((places.keys >= 0).any()) and bool((places.cells == places.cells[..., :1]).all())


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
    places: Places, splits: tuple[tuple[int, ...], ...], axes: tuple[int, ...], windows: int, value: Value
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[Tensor | None, Tensor | None], tuple[Size, Size], Tensor | None]:
    """Return places of queries and keys, how many are off the grid, their order, their grids and what they see."""
    assert places.keys is not None  # so has a map its keys
    assert places.key_grid is not None
    assert value.tensor is not None
    queries = arrange_map(places.cells, splits, axes, windows)[:windows, 0, :, 0]
    keys = arrange_map(places.keys, splits, axes, windows)[:windows, 0, 0]
    spread = [renumber(Places(queries, places.grid)), renumber(Places(keys, places.key_grid))]
    grids = (spread[0].grid, spread[1].grid)
    parts = [_positions(part.cells, part.grid) for part in spread]
    orders = (parts[0][2], parts[1][2])
    weights = arrange_map(value.tensor, splits, axes, windows)
    attended = weights.reshape(-1, windows, *weights.shape[1:]) > _ATTENDED
    # A mask is the same for all images and heads; weights that vanish for some of them only are the attention's own.
    masked = torch.equal(attended.any(2).any(0), attended.all(2).all(0))
    seen = attended.any(2).any(0) if masked else torch.ones_like(attended[0, :, 0])
    for axis, order in zip((-2, -1), orders, strict=True):
        seen = seen if order is None else seen.index_select(axis, order)
    return parts[0][0], parts[1][0], (parts[0][1], parts[1][1]), orders, grids, None if bool(seen.all()) else seen


def _positions(cells: Tensor, grid: Size) -> tuple[Tensor, int, Tensor | None]:
    """Return (row, column) of the spatial tokens of each window, how many others there are, and the order of all."""
    off = ((cells < 0) & (cells != PADDING)).all(0)
    prefix = int(off.sum())
    order = None if bool(off[:prefix].all()) else torch.argsort(~off, stable=True)
    spatial = (cells if order is None else cells[:, order])[:, prefix:]
    inside = spatial % math.prod(grid)
    positions = torch.stack((inside // grid[1], inside % grid[1]), -1)
    return torch.where(spatial[..., None] >= 0, positions, -1), prefix, order
