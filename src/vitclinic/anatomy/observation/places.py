"""Places: where on the image's grid each number of a tensor comes from, and what mixes them.

Every image-dependent tensor of a recorded pass has `Places`: for each of its entries, the number of the grid cell that
it describes. The rules here, of the operations that mix cells, and those in `follow` carry them through the operations.
So prefix tokens, windows, axes and grids are read off rather than guessed, in any layout.

A product with a fixed matrix acts on each cell if it runs along channels; along cells it merges them into patches, or
mixes them. A product of two image-dependent tensors is a score along channels and an attention along cells. A
convolution or pooling that changes the size of a feature map begins a new grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Mixing = Literal["attention", "matrix", "conv", "pool", "context", "join", "choice"]
"""`context` is one vector of all cells by softmax or by a product of features, which says nothing of any one cell.

`join` is arithmetic of a cell with other cells, as in a recurrence written as a loop or a difference of neighbours;
`choice` picks cells that the image decides on, as the nearest neighbours of a graph.
"""
Size = tuple[int, int]

OFF_GRID, PADDING, MIXED = -1, 1 - 2**20, -(2**20)
"""Instead of a cell: a number that comes from no image, from padding, or from several cells.

The numbers from OFF_GRID down to PADDING tell tokens apart that come from no image, such as class tokens and registers.
"""


@dataclass(frozen=True, eq=False)
class Places:
    """Cells of a tensor's entries: `cells` has its shape, with values image * H * W + row * W + column.

    Attention scores have two places: that of the query, in `cells`, and that of the key, in `keys`.
    """

    cells: Tensor
    grid: Size
    keys: Tensor | None = None
    key_grid: Size | None = None

    def map(self, function: Callable[[Tensor], Any]) -> Any:
        """Apply a function that moves numbers; it may return several tensors."""
        cells = function(self.cells)
        if self.keys is None:
            return pytree.tree_map(lambda part: Places(part, self.grid), cells)
        keys = function(self.keys)
        return pytree.tree_map(lambda part, key: Places(part, self.grid, key, self.key_grid), cells, keys)


@dataclass(frozen=True)
class Step:
    """An operation as the rules see it: its name, arguments, results, and the places of its tensors."""

    name: str
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]
    of: Callable[[Any], Places | None]
    """Returns the places of an argument; None if it does not depend on the image."""
    images: int
    """Number of images that pass."""
    tokens: Iterator[int]
    """Gives a new number to each token that comes from no image."""

    @property
    def tracked(self) -> list[Places]:
        """Places of all arguments that have them."""
        return [found for value in pytree.tree_leaves((self.args, self.kwargs)) if (found := self.of(value))]

    @property
    def written(self) -> list[Tensor]:
        """Arguments that the operation writes to."""
        schema: Any = self.func._schema  # type: ignore[attr-defined]
        if not schema.is_mutable:
            return []
        named = {
            **dict(zip((argument.name for argument in schema.arguments), self.args, strict=False)),
            **self.kwargs,
        }
        mutable = [argument.name for argument in schema.arguments if argument.is_write]
        return [value for name in mutable if isinstance(value := named.get(name), Tensor)]

    @property
    def adds_nothing(self) -> bool:
        """True for 0 + x, with which Python's `sum` begins."""
        return self.name == "add" and not any(isinstance(x, Tensor) for x in self.args[1:]) and self.args[1] == 0


Outcome = tuple[Sequence[Places], Mixing | None]


def places_of_image(shape: torch.Size) -> Places:
    """Return the places of images [B, C, H, W]: every pixel is a cell."""
    return new_grid(shape, shape[0])


def new_grid(shape: torch.Size, images: int) -> Places:
    """Return the places of a feature map [B, C, H, W] that begins a grid."""
    height, width = shape[-2:]
    cells = torch.arange(images * height * width).view(images, 1, height, width)
    return Places(cells.expand(shape), (height, width))


def full(shape: torch.Size, code: int) -> Tensor:
    return torch.full((1,) * len(shape), code).expand(shape)


def renumber(places: Places) -> Places:
    """Return the places on a grid of their own, if they are every so many-th row and column of a larger one."""
    height, width = places.grid
    valid = places.cells >= 0
    if not bool(valid.any()):
        return places
    inside = places.cells % (height * width)
    rows, columns = (torch.unique(part[valid]) for part in (inside // width, inside % width))
    if (len(rows), len(columns)) == places.grid:
        return places
    row, column = torch.searchsorted(rows, inside // width), torch.searchsorted(columns, inside % width)
    numbers = places.cells // (height * width) * len(rows) * len(columns) + row * len(columns) + column
    return Places(torch.where(valid, numbers, places.cells), (len(rows), len(columns)), places.keys, places.key_grid)


def merge(places: Places, axis: int) -> Places | None:
    """Return the grid of patches, if each slice along `axis` holds cells of its own; the axis is gone."""
    rows = places.cells.movedim(axis, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    on_grid = (flat >= 0).all(-1)
    whole = flat[on_grid]
    if not len(whole) or bool((flat[~on_grid] >= 0).any()):
        return None
    pairs = torch.unique(torch.arange(len(whole))[:, None] * (int(whole.max()) + 1) + whole)
    if len(pairs) != len(torch.unique(whole)):
        return None
    height, width = places.grid
    first = whole.amin(-1)
    image, cell = first // (height * width), first % (height * width)
    corners = [torch.unique(part, return_inverse=True) for part in (cell // width, cell % width)]
    grid = (len(corners[0][0]), len(corners[1][0]))
    numbers = image * grid[0] * grid[1] + corners[0][1] * grid[1] + corners[1][1]
    cells = flat[:, 0].clone()
    cells[on_grid] = numbers
    return Places(cells.reshape(rows.shape[:-1]), grid)


def off_grid_tokens(shape: torch.Size, axis: int, tokens: Iterator[int]) -> Tensor:
    """Return the places of tokens along an axis that come from no image."""
    numbers = torch.tensor([OFF_GRID - next(tokens) for _ in range(shape[axis])], dtype=torch.long)
    aligned = [-1 if other == axis % len(shape) else 1 for other in range(len(shape))]
    return numbers.view(aligned).expand(shape)


def is_constant(cells: Tensor, axis: int) -> bool:
    """Return True if no two cells meet along an axis; a class token or a context beside a cell is none."""
    if cells.stride(axis) == 0:
        return True
    return bool(((cells < 0) | (cells == cells.amax(axis, keepdim=True))).all())


def joined(cells: Tensor, axis: int) -> Tensor:
    """Return the one cell along an axis, which stays with length 1."""
    return cells.narrow(axis, 0, 1) if cells.stride(axis) == 0 else cells.amax(axis, keepdim=True)


FILLS = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
"""Operations that take a tensor's shape and none of its numbers."""
FIXED_MIXERS = (
    *("_fft_r2c", "_fft_c2r", "_fft_c2c", "mkldnn_rnn_layer", "lstm", "gru"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
)
"""Operations that mix cells in a fixed way and lose them: Fourier transforms, recurrent layers and running sums."""


def lose(step: Step) -> Outcome:
    """Rule of an operation after which cells are not known."""
    grid = step.tracked[0].grid
    mixing: Mixing | None = "matrix" if step.name in FIXED_MIXERS else None
    return [Places(full(output.shape, MIXED), grid) for output in step.outputs], mixing


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


def sample(step: Step) -> Outcome:
    """Rule of sampling a feature map at points: if these depend on the image, it attends to cells."""
    outcome, _ = resize(step)
    return outcome, None if step.of(step.args[1]) is None else "attention"


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
    mixing: Mixing = "context" if 1 in output.shape[-2:] else "attention"
    if mixed[0] and mixed[1]:
        return [Places(rows, left.grid)], mixing
    if mixed[0] or mixed[1]:  # keys and values that a fixed matrix has mixed (Linformer), or a mean
        return [Places(columns, right.grid) if mixed[0] else Places(rows, left.grid)], mixing
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
