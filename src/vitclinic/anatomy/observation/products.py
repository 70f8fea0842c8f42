"""Rules of the operations that mix cells: products, convolutions and pooling.

A product with a fixed matrix acts on each cell if it runs along channels; along cells it merges them into patches, or
mixes them. A product of two image-dependent tensors is a score along channels and an attention along cells. A
convolution or pooling that changes the size of a feature map begins a new grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vitclinic.anatomy.observation.places import (
    MIXED,
    Mixing,
    Outcome,
    Places,
    Step,
    full,
    is_constant,
    joined,
    lose,
    merge,
    new_grid,
    renumber,
)


def convolve(step: Step) -> Outcome:
    """Rule of a convolution: 1 x 1 acts on each cell, a larger kernel mixes neighbours."""
    x, weight, stride = step.args[0], step.args[1], step.args[3]
    places, output = step.of(x), step.outputs[0]
    if places is None:
        return lose(step)
    if all(side == 1 for side in weight.shape[2:]):
        return _convolve_points(step, places, weight, stride, output)
    if output.ndim != 4:
        same = output.shape[2:] == x.shape[2:]
        cells = places.cells[:, :1].expand(output.shape) if same else full(output.shape, MIXED)
        return [Places(cells, places.grid)], "conv"
    return [_on_map(step, places, output)], "conv"


def _convolve_points(step: Step, places: Places, weight: Tensor, stride: Sequence[int], output: Tensor) -> Outcome:
    if any(side > 1 for side in stride) and output.ndim == 4:
        return [_on_map(step, places, output)], None
    one_group = step.args[-1] == 1
    if one_group and not is_constant(places.cells, 1):
        return _contract_fixed(places, 1, output)
    if weight.shape[0] == places.cells.shape[1]:
        return [places], None
    return [places.map(lambda cells: joined(cells, 1).expand(output.shape))], None


def pool(step: Step) -> Outcome:
    """Rule of pooling: to one cell, places are lost; else it mixes neighbours."""
    places, output = step.of(step.args[0]), step.outputs[0]
    if places is None or output.ndim != 4 or output.shape[-2:] == (1, 1):
        return lose(step)
    rest = [Places(full(part.shape, MIXED), places.grid) for part in step.outputs[1:]]
    return [_on_map(step, places, output), *rest], "pool"


def resize(step: Step) -> Outcome:
    places, output = step.of(step.args[0]), step.outputs[0]
    return ([_on_map(step, places, output)] if places is not None and output.ndim == 4 else lose(step)[0]), None


def _on_map(step: Step, places: Places, output: Tensor) -> Places:
    """Return the places after an operation on a feature map; it begins a grid if its size is another."""
    source = places.cells
    if output.shape[-2:] == source.shape[-2:]:
        cells = source[:, :1].expand(output.shape)
        if bool((cells >= 0).any()) or output.shape[0] != step.images:
            return Places(cells, places.grid)
    if output.shape[0] == step.images:
        return new_grid(output.shape, step.images)
    # Of windows, or of heads: every so many-th cell.
    strides = [before // max(1, after) for before, after in zip(source.shape[-2:], output.shape[-2:], strict=True)]
    cells = source[:, :1, :: strides[0], :: strides[1]][..., : output.shape[-2], : output.shape[-1]]
    if cells.shape[-2:] != output.shape[-2:]:
        return Places(full(output.shape, MIXED), places.grid)
    sparse = renumber(Places(cells, places.grid))
    return Places(sparse.cells.expand(output.shape), sparse.grid)


def multiply(step: Step) -> Outcome:
    """Rule of a matrix product."""
    left, right = step.args[-2:] if step.name in ("addmm", "baddbmm") else step.args[:2]
    return _contract(step.of(left), step.of(right), step.outputs[0])


def multiply_linear(step: Step) -> Outcome:
    places = step.of(step.args[0])
    return lose(step) if places is None else _contract(places, None, step.outputs[0])


def _contract(left: Places | None, right: Places | None, output: Tensor) -> Outcome:
    """Return the places of left [..., R, K] times right [..., K, M], either of which may be free of the image."""
    if left is None or right is None:
        known, axis = (left, -1) if left is not None else (right, -2)
        if known is None:
            return [], None
        return _contract_fixed(known, axis, output)
    along = [is_constant(left.cells, -1), is_constant(right.cells, -2)]
    if all(along) and left.keys is None and right.keys is None:
        return _score(left, right, output)
    keyed = left.keys is not None or right.keys is not None
    mixing: Mixing = "attention" if keyed or 1 not in output.shape[-2:] else "context"
    if right.keys is None and (along[0] or left.keys is not None):
        left = _rows(left, -1)
        return [Places(joined(left.cells, -1).expand(output.shape), left.grid)], mixing
    if left.keys is None and (along[1] or right.keys is not None):
        right = _rows(right, -2)
        return [Places(joined(right.cells, -2).expand(output.shape), right.grid)], mixing
    return [Places(full(output.shape, MIXED), left.grid)], mixing


def _rows(places: Places, axis: int) -> Places:
    """Return which of the two places of weights a product along `axis` keeps: queries, which may be columns."""
    if places.keys is None or places.key_grid is None or is_constant(places.cells, axis):
        return places
    return Places(places.keys, places.key_grid)


def _score(left: Places, right: Places, output: Tensor) -> Outcome:
    """Return the places of a product along channels: scores of queries and keys, if both have cells."""
    rows, columns = joined(left.cells, -1).expand(output.shape), joined(right.cells, -2).expand(output.shape)
    mixed = [bool((cells == MIXED).all()) for cells in (rows, columns)]
    if mixed[0] and mixed[1]:
        return [Places(rows, left.grid)], "context" if 1 in output.shape[-2:] else "attention"
    if mixed[0] or mixed[1]:
        return [Places(columns, right.grid) if mixed[0] else Places(rows, left.grid)], None
    return [Places(rows, left.grid, columns, right.grid)], None


def _contract_fixed(places: Places, axis: int, output: Tensor) -> Outcome:
    """Return the places of a product with a fixed matrix along an axis.

    Along channels it acts on each cell. Along cells it merges them into patches, which begin a grid, if no two results
    share a cell; otherwise it mixes them.
    """
    if is_constant(places.cells, axis):
        return [places.map(lambda cells: joined(cells, axis).expand(output.shape))], None
    merged = merge(places, axis)
    if merged is None:
        return [Places(full(output.shape, MIXED), places.grid)], "matrix"
    return [Places(merged.cells.unsqueeze(axis).expand(output.shape), merged.grid)], None
