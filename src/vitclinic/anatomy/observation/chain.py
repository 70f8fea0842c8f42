"""Chains of units without residuals: one for each convolution or attention of a stretch of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitclinic.anatomy.observation.attention import find_attention
from vitclinic.anatomy.observation.locate import NO_GRID, Locator
from vitclinic.anatomy.observation.naming import Draft
from vitclinic.anatomy.observation.stretch import ACTIVATIONS, Stretch, find_bypass, has_detour
from vitclinic.anatomy.observation.trace import NORMS, Call, Trace, Value, has_cells
from vitclinic.anatomy.removal import Silence
from vitclinic.anatomy.sites import Site
from vitclinic.anatomy.units import Unit


def complete(unit: Unit, stretch: Stretch, locator: Locator) -> Unit:
    """Add what can be seen of the inside of a unit."""
    activation = None if unit.kind == "msa" else stretch.activation()
    return replace(
        unit,
        norm=stretch.norm(),
        attention=find_attention(stretch, locator) if unit.kind == "msa" else None,
        activation=None if activation is None else _read_neurons(activation, locator),
        parameters=stretch.parameters(),
    )


def _read_neurons(activation: int, locator: Locator) -> Site | None:
    """Return the site of hidden neurons, which need no grid; arranged, so that images come first in every network."""
    site = locator.read(activation)
    return None if site is None else replace(site, layout=NO_GRID)


@dataclass(frozen=True, eq=False)
class Chains:
    """Chains of one recorded pass.

    Args:
        record: The pass.
        locator: Finds sites in it.
        root: The call of the network.
        image: The value that enters the network.
        output: The value that it returns.
    """

    record: Trace
    locator: Locator
    root: Call
    image: int
    output: int

    def draft(self, first: int, last: int, from_image: bool = False) -> Iterator[Draft]:
        """Yield one unit per convolution or attention of a stretch; from the image on, the first is the stem."""
        stretch = Stretch(self.record, first, last, self.root)
        mixers = [value for value in stretch.mixers if has_cells(value)]
        groups = dict.fromkeys(group for value in mixers if (group := self._group(value, mixers, stretch)))
        for number, (call, begin, end) in enumerate(groups):
            part = Stretch(self.record, begin, end, call if call.parent is None else call.parent)
            before, after = self.locator.read(begin), self.locator.read(end, [call])
            if before is None or after is None:
                continue
            if number == 0 and from_image:
                unit = Unit("stem", "stem", 0, call.module, self.locator.read(self.image) or before, after)
                yield Draft(end, call, replace(unit, parameters=part.parameters()), fixed="stem")
                continue
            unit = Unit("", part.kind, 0, call.module, before, after, removal=find_bypass(part) or self._silence(end))
            yield Draft(end, call, complete(unit, part, self.locator), own=True)

    def _silence(self, end: int) -> Silence | None:
        """Return the removal of features that lie beside others, as those of a dense layer or a parallel branch."""
        outputs = [site for found in self.record.values[end].ends if (site := self.locator.replace_at(end, found))]
        return Silence(outputs[-1]) if outputs and has_detour(self.record, self.image, self.output, end) else None

    def _group(self, mixer: Value, mixers: list[Value], stretch: Stretch) -> tuple[Call, int, int] | None:
        """Return the widest call with no other mixer in it, the value that enters it, and the one that leaves it."""
        others = [value for value in mixers if value is not mixer]
        wide = [
            call
            for call in mixer.call.chain()
            if call.path and stretch.contains(call) and not any(call in other.call.chain() for other in others)
        ]
        for call in reversed(wide):
            inputs, outputs = (self.record.ends_of.get((call, end), []) for end in ("in", "out"))
            if inputs and outputs and has_cells(outputs[0]):
                return call, inputs[0].index, self._follow(outputs[0].index, others)
        return None

    def _follow(self, state: int, others: list[Value]) -> int:
        """Return the state after the norms, activations and pooling that follow a convolution directly."""
        for value in self.record.values[state + 1 :]:
            if value in others:
                break
            if state in value.parents and value.places is not None:
                light = value.op in NORMS or value.op in ACTIVATIONS or value.mixing == "pool"
                if not light or self.locator.read(value.index) is None or not has_cells(value):
                    break
                state = value.index
        return state
