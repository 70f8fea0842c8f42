"""The layout of a recorded value: which axes are images, cells and channels, and where tokens off the grid lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitclinic.anatomy.observation.places import PADDING, Places, renumber
from vitclinic.anatomy.sites import Arrangement, Layout, Size

NO_GRID = Layout(spatial=False)


@dataclass(frozen=True, eq=False)
class Found:
    """A value's layout, and the way to it if its axes lie otherwise."""

    layout: Layout
    arrangement: Arrangement | None = None


class Layouts:
    """Layouts of the values of one pass: values that lie alike share one.

    Args:
        read: Numbers of the tokens off the grid that the head reads, class tokens, which come first of all.
        known: False if that cannot be told; then the first token off the grid is taken for the class token.
    """

    def __init__(self, read: Sequence[int] = (), known: bool = False) -> None:
        self._read, self._known = read, known
        self._shared: dict[tuple[object, ...], Layout] = {}

    def of(self, places: Places | None) -> Found:
        """Return the layout of a value with these places; one without cells has no grid."""
        if places is None or places.cells.ndim not in (3, 4) or not bool((places.cells >= 0).any()):
            return Found(NO_GRID)
        places = renumber(Places(_collapse(places.cells), places.grid))
        cells = places.cells
        axes = _axes(cells, places.grid)
        if axes is None:
            return Found(NO_GRID)
        batch, *positions, channel = axes
        tokens = cells.permute(axes).flatten(1, -2)[0, :, 0]
        on_grid = tokens >= 0
        prefix, has_class = int((~on_grid).sum()), self.has_class(tokens)
        if not torch.equal(tokens[on_grid].sort().values, torch.arange(places.grid[0] * places.grid[1])):
            return Found(NO_GRID)
        off_grid = self.in_order(tokens)[:prefix]
        order = torch.cat((off_grid, tokens.clamp(min=-1).argsort()[prefix:]))
        in_order = bool((order == torch.arange(len(order))).all())
        if in_order and batch == 0:
            if tuple(cells.shape[axis] for axis in positions) == places.grid:
                return Found(self._share(0, channel == 3, places.grid, True))
            if positions == [1]:
                return Found(self._share(prefix, False, places.grid, has_class))
        arrangement = Arrangement(tuple(axes), None if in_order else order)
        return Found(self._share(prefix, False, places.grid, has_class), arrangement)

    def has_class(self, tokens: Tensor) -> bool:
        """Return True if the first of the tokens off the grid is the class token, or may be it."""
        return not self._known or any(bool((tokens == token).any()) for token in self._read)

    def in_order(self, tokens: Tensor) -> Tensor:
        """Return which token comes where: class tokens, others off the grid, and the rest in order."""
        ranks = torch.where((tokens < 0) & (tokens != PADDING), len(self._read), len(self._read) + 1)
        for rank, token in enumerate(self._read):
            ranks = torch.where(tokens == token, rank, ranks)
        return torch.argsort(ranks, stable=True)

    def _share(self, prefix: int, channels_last: bool, size: Size, has_class: bool) -> Layout:
        key = (prefix, channels_last, size, has_class)
        if key not in self._shared:
            self._shared[key] = Layout(prefix=prefix, channels_last=channels_last, size=size, has_class=has_class)
        return self._shared[key]


def _collapse(cells: Tensor) -> Tensor:
    """Return the cells with one entry along each axis that repeats them, as channels do."""
    for axis in range(cells.ndim):
        if cells.stride(axis) == 0:
            cells = cells.narrow(axis, 0, 1)
    return cells


def _axes(cells: Tensor, grid: Size) -> list[int] | None:
    """Return the axes of images, cells and channels, in this order; None if they cannot be told apart."""
    per_image = grid[0] * grid[1]
    on_grid = cells >= 0
    least, most = (torch.where(on_grid, cells // per_image, other) for other in (cells.numel(), -1))
    constant = [axis for axis in range(cells.ndim) if bool((cells == cells.narrow(axis, 0, 1)).all())]
    batch = [axis for axis in range(cells.ndim) if bool((most.amax(axis) > least.amin(axis)).any())]
    if len(batch) != 1:
        return None
    free = [axis for axis in constant if axis != batch[0]]
    if not free:
        return None
    last = cells.ndim - 1
    channel = last if last in free else 1 if cells.ndim == 4 and 1 in free else free[0]
    if cells.ndim == 4 and 1 in free and last in free:  # a grid of one cell, or one row
        channel = 1 if cells.shape[2:] == grid else last
    return [batch[0], *(axis for axis in range(cells.ndim) if axis not in (batch[0], channel)), channel]
