"""From values of a recorded pass to sites: their layout, and where they can be read again.

The layout says which axes are images, cells and channels, and where tokens off the grid lie. A value is read again at a
module's end or at an addition.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy.forward import Operand
from vitclinic.anatomy.observation.places import PADDING, Places, renumber
from vitclinic.anatomy.observation.residuals import origin
from vitclinic.anatomy.observation.trace import Call, End, Trace, Value, has_cells
from vitclinic.anatomy.sites import Arrangement, Layout, Site, Size

NO_GRID = Layout(spatial=False)
_SELECTIONS = frozenset(
    ("select", "slice", "index", "index_select", "gather", "split", "split_with_sizes", "unbind", "narrow")
)
"""Operations that take some tokens out of many."""


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


def find_layouts(record: Trace, last: int, output: int, outputs: Iterable[int]) -> Layouts:
    """Return the layouts of a pass, with the tokens off the grid that the head takes out of the last state."""
    read: dict[int, None] = {}
    for value in record.values[last + 1 : output + 1]:
        if not record.depends(output, value.index):
            continue
        chosen = value.op in _SELECTIONS and any(has_cells(record.values[parent]) for parent in value.parents)
        if value.places is not None and not has_cells(value) and (chosen or value.index == output):
            tokens = value.places.cells[value.places.cells > PADDING]
            read |= dict.fromkeys(sorted(torch.unique(tokens).tolist(), reverse=True))
            if chosen and not len(tokens):
                return Layouts()  # a token that was made from the image
    whole = any(has_cells(record.values[index]) for index in outputs)
    return Layouts(tuple(read), known=bool(read) or not whole)


class Locator:
    """Finds sites for the values of a trace.

    Args:
        record: The trace.
        entrance: The module that is called once a pass; calls of others are counted within it.
        layouts: Layouts of the values.
    """

    def __init__(self, record: Trace, entrance: nn.Module, layouts: Layouts) -> None:
        self.record = record
        self._entrance = entrance
        self.layouts = layouts
        self._calls = Counter(call.module for call in record.calls)
        self._uses = Counter(parent for value in record.values for parent in value.parents)
        self._shown: defaultdict[int, list[int]] = defaultdict(list)
        """For each value, those that show it in another arrangement."""
        for value in record.values:
            if value.places is not None:
                self._shown[origin(record, value.index)].append(value.index)

    def read(self, index: int, prefer: Iterable[Call] = (), layout: Layout | None = None) -> Site | None:
        """Return a site at which a value can be read, best at an end of one of the calls `prefer`."""
        return self.read_exactly(self.readable(index), prefer, layout)

    def read_exactly(self, index: int, prefer: Iterable[Call] = (), layout: Layout | None = None) -> Site | None:
        """Return a site for just this value, in its own arrangement."""
        wanted = list(prefer)
        ranked = sorted(
            self.record.values[index].ends,
            key=lambda end: (
                self._calls[end.call.module] > 1,
                wanted.index(end.call) if end.call in wanted else len(wanted),
                end.end == "in",
            ),
        )
        return self._at(index, ranked[0], layout) if ranked else self._at_addition(index)

    def is_readable(self, index: int) -> bool:
        """Return True if there is a site for just this value."""
        return self.read_exactly(index) is not None

    def readable(self, index: int) -> int:
        """Return the value itself if it can be read, else the first that shows it in another arrangement and can."""
        shown = (index, *self._shown[origin(self.record, index)])
        return next((other for other in shown if self.is_readable(other)), index)

    def read_operand(self, index: int, total: int) -> Site | None:
        """Return a site at which an operand of the sum `total` can be read, in just the sum's arrangement."""
        return self.read_exactly(index) or self._operand(index, total)

    def replace(self, index: int, total: int) -> Site | None:
        """Return a site at which a value, an operand of the sum `total`, can be replaced."""
        outputs = [end for end in self.record.values[index].ends if end.end == "out"]
        single = [end for end in outputs if self._calls[end.call.module] == 1]
        place = self._operand(index, total)
        if outputs and (place is None or self._uses[index] == 1):
            return self._at(index, (single or outputs)[-1])
        return place

    def replace_at(self, index: int, end: End) -> Site | None:
        """Return the site at this end of a module if a value can be replaced there: as what a single call returns."""
        return self._at(index, end) if end.end == "out" and self._calls[end.call.module] == 1 else None

    def read_change(self, skip: int, total: int, place: int) -> tuple[Site | None, Site | None]:
        """Return the sites at `total` of the state that it changes, an operand at this place, and of the change."""
        sites = (self._at_addition(total, "left", skip), self._at_addition(total, "change"))
        before, change = (None if site is None else replace(site, item=place) for site in sites)
        return before, change

    def _operand(self, index: int, total: int) -> Site | None:
        operands = self.record.values[total].parents[:2]
        return (
            self._at_addition(total, "left" if operands[0] == index else "right", index) if index in operands else None
        )

    def _at(self, index: int, end: End, layout: Layout | None = None) -> Site:
        fields = self._fields(index, end.call)
        if layout is not None:
            fields |= {"layout": layout, "arrangement": None}
        return Site(end.call.module, end.end, item=end.item, **fields)

    def _at_addition(self, index: int, operand: Operand = "sum", of: int | None = None) -> Site | None:
        """Return the site at the sum `index`, or at its operand `of`; None if the network's code does not show it."""
        value = self.record.values[index]
        if (value.op != "add" and not value.joined) or not value.numbers:
            return None
        call, (number,), _ = self.find_call(value)
        fields = self._fields(index if of is None else of, call)
        return Site(call.module, operand, addition=number, additions=call.counts["addition"], **fields)

    def find_call(self, value: Value, *others: Value) -> tuple[Call, tuple[int, ...], nn.Module | None]:
        """Return the innermost call around additions or attentions, their numbers there, and what to count calls in.

        A module that is called once is better than an inner one that is called several times.
        """
        around = [call for call in reversed(value.numbers) if all(call in other.numbers for other in others)]
        call = next((found for found in around if self._calls[found.module] == 1), around[0])
        numbers = tuple(one.numbers[call] for one in (value, *others))
        return call, numbers, self._entrance if self._calls[call.module] > 1 else None

    def _fields(self, index: int, call: Call) -> dict[str, Any]:
        value = self.record.values[index]
        found = self.layouts.of(value.places)
        fields: dict[str, Any] = {
            "layout": found.layout,
            "arrangement": found.arrangement,
            "overwritten": value.overwritten,
        }
        if self._calls[call.module] > 1:
            fields |= {"within": self._entrance, "call": call.number}
        return fields
