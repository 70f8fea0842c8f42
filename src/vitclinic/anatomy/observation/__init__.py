"""Anatomy by observation: the units of any network, from the record of one forward pass.

Residual steps are units; their kind follows from how they mix cells. What lies between two of them is a `pool` where
the grid changes, and a chain of convolutions or attentions where there is more to it, as in a network without
residuals. What comes before the first unit is the stem, with the position embedding, and what comes after the last is
the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError, UnknownStructureError
from vitclinic.anatomy.observation.attention import find_attention
from vitclinic.anatomy.observation.locate import NO_GRID, Draft, Locator, find_layouts, finish, has_cells
from vitclinic.anatomy.observation.places import MIXED, Places
from vitclinic.anatomy.observation.residuals import (
    ACTIVATIONS,
    MOVES,
    Step,
    Stretch,
    find_bypass,
    find_steps,
    has_detour,
    origin,
    weights_behind,
)
from vitclinic.anatomy.observation.trace import LAYERS, NORMS, Call, Trace, Value, trace
from vitclinic.anatomy.removal import Erase, Silence
from vitclinic.anatomy.units import Kind, Residual, Unit
from vitclinic.anatomy.wrappers import reason

_LIGHT = MOVES | NORMS | ACTIVATIONS
"""Operations that may stand between a residual sum and the state that the next unit reads."""
_LONG_STEM = 6
"""A stem with more convolutions than this is a network of its own, whose parts are units."""


@dataclass(frozen=True)
class Observation:
    """The units that one forward pass shows, and sentences on what it does not."""

    units: list[Unit]
    notes: tuple[str, ...]


def observe(network: nn.Module, entrance: nn.Module, images: Tensor) -> Observation:
    """Find the units of a network, in the order of its forward pass, from one pass of two images.

    Args:
        network: The network.
        entrance: The module to call with the images: the network, or a wrapper of it.
        images: Two images.

    Raises:
        UnknownStructureError: The pass shows no units.
    """
    try:
        record = trace(network, entrance, images)
    except Exception as error:  # the user's own code may raise anything
        shape = " x ".join(str(side) for side in images.shape[1:])
        raise AnatomyError(f"{type(network).__name__} cannot take {shape} images: {reason(error)}.") from error
    observer = _Observer(record, entrance)
    units = finish(observer.drafts(), record)
    if len(units) < 3:
        raise UnknownStructureError(
            f"one forward pass of {type(network).__name__} shows no units: neither residual additions nor a chain of "
            "convolutions on the way from the image to the output."
        )
    return Observation(units, tuple(observer.notes(units)))


class _Observer:
    """One observation: turns the values of a trace into units."""

    def __init__(self, record: Trace, entrance: nn.Module) -> None:
        self.record = record
        steps = [step for step in find_steps(record) if not _is_lost(record.values[step.total].places)]
        self.steps = [step for step in steps if not _is_of_stem(record.values[step.total])]
        self.settled = {step.total: self._settle(step) for step in self.steps}
        outputs = [index for index in record.outputs if record.values[index].places is not None]
        if not outputs:
            raise UnknownStructureError("the network's output does not depend on the image.")
        self.output = next((index for index in outputs if len(record.values[index].shape) == 2), outputs[0])
        self.root = record.calls[0]
        entering = record.ends_of.get((self.root, "in"), [])
        self.image = next((value.index for value in entering if has_cells(value)), 0)
        last = max(self.settled.values(), default=self.image)
        self.locator = Locator(record, entrance, find_layouts(record, last, self.output, outputs))

    def drafts(self) -> list[Draft]:
        """Return the units in the order of their ends."""
        found = [draft for step in self.steps if (draft := self._residual(step))]
        found += self._gaps()
        found.sort(key=lambda draft: draft.index)
        return [*found, self._head(found[-1])] if found else []

    def notes(self, units: list[Unit]) -> Iterator[str]:
        """Yield what a reader should know of an anatomy that was observed."""
        runs = sum(call.module is self.root.module for call in self.record.calls)
        if runs > 1:
            yield f"the network runs {runs} times for each batch of images; only the first run is read."
        elif any(step.again for step in self.steps):
            yield "parts of the network run more than once for each image; the first run is read, and none is removed."
        if plain := [unit.name for unit in units if unit.kind == "msa" and unit.attention is None]:
            yield f"no softmax over tokens, or several that differ, make the attention of {', '.join(plain)}: no map."
        maps = {unit.name: unit.attention.seen for unit in units if unit.attention is not None}
        if mixed := [name for name, seen in maps.items() if seen is not None and seen.mixed_later]:
            yield f"the heads of {', '.join(mixed)} are mixed after the softmax; maps are those before."
        if bare := [unit.name for unit in units if unit.kind in ("msa", "mlp", "token_mlp") and unit.residual is None]:
            yield f"no residual addition was seen at {', '.join(bare)}; what follows there may be missed."
        if lost := [unit.name for unit in units[:-1] if not unit.output.layout.spatial]:
            yield f"the outputs of {', '.join(lost)} are not features on a grid."

    def _settle(self, step: Step) -> int:
        """Return the state after a residual sum: behind the activation or norm that the next unit reads it through."""
        owner = self.record.values[step.total].call
        for other in self.steps:
            if self.record.depends(other.source, step.total):
                inside = self.record.between(step.total, other.source)
                if all(value.op in _LIGHT and owner in value.call.chain() for value in inside):
                    return origin(self.record, other.source)
                break
        state = step.total
        for value in self.record.values[step.total + 1 : owner.end or None]:
            if state in value.parents:
                if value.op not in ACTIVATIONS:
                    break
                state = value.index
        return state

    def _enter(self, step: Step) -> int:
        """Return the state that a unit reads: before the norm and activation of a pre-activation block's own."""
        owner, value = self.record.values[step.total].call, self.record.values[step.source]
        totals = {other.total for other in self.steps}
        while value.op in _LIGHT and owner in value.call.chain() and value.index not in totals:
            value = next(parent for index in value.parents if (parent := self.record.values[index]).places is not None)
        return self.locator.readable(value.index)

    def _residual(self, step: Step) -> Draft | None:
        """Return the unit of a residual step."""
        owner, end = self.record.values[step.total].call, self.settled[step.total]
        stretch = Stretch(self.record, step.source, step.branch, owner)
        before, after = self.locator.read(self._enter(step), [owner]), self.locator.read(end, [owner])
        if step.state is None:
            skip = self.locator.read_operand(step.skip, step.total)
            branch = self.locator.replace(step.branch, step.total)
        else:
            skip, branch = self.locator.read_change(step.skip, step.total, step.state)
        total = self.locator.read_exactly(step.total, [owner])
        if before is None or after is None:
            return None
        unit = Unit("", stretch.kind, 0, stretch.module(), before, after)
        if skip is not None and total is not None and branch is not None:
            # The three lie alike, whatever can be seen of each.
            skip, branch = (replace(s, layout=total.layout, arrangement=total.arrangement) for s in (skip, branch))
            removal = None if step.again else Silence(branch)  # it would remove one of several runs
            unit = replace(unit, residual=Residual(skip, branch, total), removal=removal)
        alone = sum(self.record.values[other.total].call is owner for other in self.steps) == 1
        if unit.module is None and alone and owner.path:
            unit = replace(unit, module=owner.module)
        return Draft(end, owner, self._complete(unit, stretch))

    def _complete(self, unit: Unit, stretch: Stretch) -> Unit:
        """Add what can be seen of the inside of a unit."""
        activation = None if unit.kind == "msa" else stretch.activation()
        return replace(
            unit,
            norm=stretch.norm(),
            attention=find_attention(stretch, self.locator) if unit.kind == "msa" else None,
            activation=None if activation is None else self.locator.read(activation, layout=NO_GRID),
            parameters=stretch.parameters(),
        )

    def _gaps(self) -> Iterator[Draft]:
        """Yield the stem with the position embedding, and the units between residual steps."""
        if not self.steps:
            yield from self._chain(self.image, self.output, from_image=True)
            return
        begun = False
        for step in self.steps:
            before = [other.total for other in self.steps if self.record.depends(step.source, other.total)]
            state = self._enter(step)
            if before:
                yield from self._between(self.settled[before[-1]], state)
            elif not begun:
                begun = True
                yield from self._beginning(state)

    def _between(self, first: int, last: int) -> Iterator[Draft]:
        """Yield the units from one state to the next that a residual step reads."""
        if first == last or not self.record.depends(last, first):
            return
        stretch = Stretch(self.record, first, last, self.root)
        changed = _grid(self.record.values[first]) != _grid(self.record.values[last])
        if stretch.mixers and stretch.is_nonlinear:
            yield from self._chain(first, last)
        elif changed or stretch.mixers:
            end = self._before_position(stretch)
            part = Stretch(self.record, first, last if end is None else end, self.root)
            before, after, call = self.locator.read(first), self.locator.read(part.last), part.widest_call()
            if before is not None and after is not None and call is not None:
                kind: Kind = "pool" if changed else part.kind
                unit = Unit("", kind, 0, call.module, before, after, parameters=part.parameters())
                yield Draft(part.last, call, unit, own=True)
            yield from self._position(Stretch(self.record, part.last, last, self.root))
        else:
            yield from self._position(stretch)

    def _beginning(self, last: int) -> Iterator[Draft]:
        """Yield the stem and the position embedding of a network with residual steps."""
        stretch = Stretch(self.record, self.image, last, self.root)
        if len(stretch.mixers) > _LONG_STEM and stretch.is_nonlinear:
            yield from self._chain(self.image, last, from_image=True)
            return
        yield from self._stem(stretch)

    def _stem(self, stretch: Stretch) -> Iterator[Draft]:
        """Yield the stem, which ends before tokens or positions are added, and the position embedding."""
        end, before = self._before_position(stretch), self.locator.read(self.image)
        after = None if end is None else self.locator.read(end)
        if end is None or before is None or after is None:
            return
        part = Stretch(self.record, self.image, end, self.root)
        call = part.widest_call()
        unit = Unit("stem", "stem", 0, None if call is None else call.module, before, after)
        yield Draft(end, self.root, replace(unit, parameters=part.parameters()), fixed="stem")
        yield from self._position(Stretch(self.record, end, stretch.last, self.root))

    def _before_position(self, stretch: Stretch) -> int | None:
        """Return the last value on the last grid of a stretch that comes before tokens or positions are added."""
        grid = _grid(self.record.values[stretch.last])
        end = None
        for value in stretch.values:
            if _grid(value) != grid or not has_cells(value):
                continue
            if end is not None and (value.op == "cat" or self._is_position(value)):
                break
            if self.locator.is_readable(value.index):
                end = value.index
        return end

    def _is_position(self, value: Value) -> bool:
        """Return True for a sum of a state and of numbers that differ by cell and do not depend on the image."""
        fixed = [self.record.values[parent] for parent in value.parents if self.record.values[parent].places is None]
        if value.op != "add" or len(fixed) != 1 or value.places is None or not has_cells(value):
            return False
        height, width = value.places.grid
        cells = torch.where(value.places.cells >= 0, value.places.cells % (height * width), value.places.cells)
        offset = cells.ndim - len(fixed[0].shape)
        varying = [axis for axis in range(offset, cells.ndim) if fixed[0].shape[axis - offset] > 1]
        return any(bool((cells.narrow(axis, 0, 1) != cells).any()) for axis in varying)

    def _position(self, stretch: Stretch) -> Iterator[Draft]:
        """Yield the unit that adds a position embedding in a stretch, if there is one."""
        found = [value for value in stretch.values if self._is_position(value)]
        if not found:
            return
        end = found[-1].index
        for value in stretch.values:
            if value.op == "cat" and end in value.parents and has_cells(value):
                end = value.index
        before, after = self.locator.read(stretch.first), self.locator.read(end)
        if before is None or after is None:
            return
        added = [parent for value in found for parent in value.parents if self.record.values[parent].places is None]
        weights = list(dict.fromkeys(weight for parent in added for weight in weights_behind(self.record, parent)))
        removal = Erase(weights[0]) if len(weights) == 1 else None
        call = self.record.values[end].call
        unit = Unit("position", "position", 0, call.module, before, after, removal=removal, parameters=tuple(weights))
        yield Draft(end, call, unit, fixed="position")

    def _chain(self, first: int, last: int, from_image: bool = False) -> Iterator[Draft]:
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
            yield Draft(end, call, self._complete(unit, part), own=True)

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

    def _head(self, last: Draft) -> Draft:
        """Return the unit from the last state to the network's output."""
        stretch = Stretch(self.record, last.index, self.output, self.root)
        layers = [value for value in stretch.values if value.op in LAYERS]
        call = layers[-1].call if layers else self.root
        acting = (value.call.module for value in stretch.values if value.op in NORMS and not _is_lost(value.places))
        norm = next((module for module in acting if module in self.record.norms), None)
        after = self.locator.read(self.output, [self.root]) or last.unit.output
        unit = Unit("head", "head", 0, call.module, last.unit.output, after, norm, parameters=stretch.parameters())
        return Draft(self.output, call, unit, fixed="head")


def _is_lost(places: Places | None) -> bool:
    """Return True if a value describes no cell and no token, as a pooled feature does."""
    return places is None or bool((places.cells == MIXED).all())


def _is_of_stem(value: Value) -> bool:
    """Return True inside a module that says it is a stem (`is_stem`): it is one unit, whatever its layers."""
    return any(getattr(call.module, "is_stem", False) for call in value.call.chain())


def _grid(value: Value) -> tuple[int, int] | None:
    return None if value.places is None else value.places.grid
