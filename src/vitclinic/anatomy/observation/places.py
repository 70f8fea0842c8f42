"""Places: where on the image's grid each number of a tensor comes from.

Every image-dependent tensor of a recorded pass has `Places`: for each of its entries, the number of the grid cell that
it describes. The rules in `follow` and `products` carry them through the operations. So prefix tokens, windows, axes
and grids are read off rather than guessed, in any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Mixing = Literal["attention", "matrix", "conv", "pool", "context"]
"""`context` is one vector of all cells by softmax or by a product of features, which says nothing of any one cell."""
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


FIXED_MIXERS = ("_fft_r2c", "_fft_c2r", "_fft_c2c", "mkldnn_rnn_layer", "lstm", "gru", "cumsum")
"""Operations that mix cells in a fixed way and lose them: Fourier transforms and recurrent layers."""


def lose(step: Step) -> Outcome:
    """Rule of an operation after which cells are not known."""
    grid = step.tracked[0].grid
    mixing: Mixing | None = "matrix" if step.name in FIXED_MIXERS else None
    return [Places(full(output.shape, MIXED), grid) for output in step.outputs], mixing
