"""Where a value of a recorded pass can be read again in later ones: at a module's end, or at an addition."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from vitclinic.anatomy.additions import Operand
from vitclinic.anatomy.observation.layouts import Layouts
from vitclinic.anatomy.observation.residuals import origin
from vitclinic.anatomy.observation.trace import Call, End, Trace, Value
from vitclinic.anatomy.sites import Layout, Site


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
