"""The values of a trace become units: residual steps, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from vitclinic._core.errors import UnknownStructureError
from vitclinic.anatomy.observation.chain import Chains, complete
from vitclinic.anatomy.observation.locate import Locator, find_layouts
from vitclinic.anatomy.observation.naming import Draft
from vitclinic.anatomy.observation.places import MIXED, Places
from vitclinic.anatomy.observation.positions import draft_position, end_before_position, grid_of
from vitclinic.anatomy.observation.residuals import MOVES, Step, find_joins, find_steps, origin, split
from vitclinic.anatomy.observation.stretch import ACTIVATIONS, Stretch, find_bypass
from vitclinic.anatomy.observation.trace import LAYERS, NORMS, Trace, Value, has_cells
from vitclinic.anatomy.removal import Silence
from vitclinic.anatomy.units import Kind, Residual, Unit

_LIGHT = MOVES | NORMS | ACTIVATIONS
"""Operations that may stand between a residual sum and the state that the next unit reads."""
_LONG_STEM = 6
"""A stem with more convolutions than this is a network of its own, whose parts are units."""


class Observer:
    """One observation: turns the values of a trace into units."""

    def __init__(self, record: Trace, entrance: nn.Module) -> None:
        self.record = record
        outputs = [index for index in record.outputs if record.values[index].places is not None]
        if not outputs:
            raise UnknownStructureError("the network's output does not depend on the image.")
        self.output = next((index for index in outputs if len(record.values[index].shape) == 2), outputs[0])
        steps = [step for step in find_steps(record, self.output) if not _is_pooled(record.values[step.total])]
        steps = [step for step in steps if not _is_of_stem(record.values[step.total])]
        self.steps = [step for step in steps if not _is_arithmetic(record, step)]
        self.joins = find_joins(record, self.steps)
        self.ends: list[int] = []
        """Values that the units end with, the head's apart; filled by `drafts`."""
        self.settled = {step.total: self._settle(step) for step in self.steps}
        self.root = record.calls[0]
        entering = record.ends_of.get((self.root, "in"), [])
        self.image = next((value.index for value in entering if has_cells(value)), 0)
        last = max(self.settled.values(), default=self.image)
        self.locator = Locator(record, entrance, find_layouts(record, last, self.output, outputs))
        self.chains = Chains(record, self.locator, self.root, self.image, self.output)
        self.steps = [part for step in self.steps for part in self._split(step)]

    def drafts(self) -> list[Draft]:
        """Return the units in the order of their ends."""
        found = [draft for step in self.steps if (draft := self._residual(step))]
        found += self._gaps()
        found.sort(key=lambda draft: draft.index)
        self.ends = [draft.index for draft in found]
        return [*found, self._head(found[-1])] if found else []

    def notes(self, units: list[Unit]) -> Iterator[str]:
        """Yield what a reader should know of an anatomy that was observed."""
        runs = sum(call.module is self.root.module for call in self.record.calls)
        if runs > 1:
            yield f"the network runs {runs} times for each batch of images; only the first run is read."
        elif any(step.again for step in self.steps):
            yield "parts of the network run more than once for each image; the first run is read, and none is removed."
        if plain := [unit.name for unit in units if unit.kind == "msa" and unit.attention is None]:
            why = "it is not one softmax over the same tokens of every image"
            yield f"no map can be recorded of the attention of {', '.join(plain)}: {why}."
        maps = {unit.name: unit.attention.seen for unit in units if unit.attention is not None}
        if mixed := [name for name, seen in maps.items() if seen is not None and seen.mixed_later]:
            yield f"the heads of {', '.join(mixed)} are mixed after the softmax; maps are those before."
        kinds = ("msa", "mlp", "token_mlp")
        if bare := [unit.name for unit in units if unit.kind in kinds and not (unit.residual or unit.removal)]:
            yield f"no residual addition was seen at {', '.join(bare)}; what follows there may be missed."
        depends = self.record.depends
        apart = [n for n, end in enumerate(self.ends) if depends(self.output, end) and not depends(self.ends[-1], end)]
        if apart:
            last = units[len(self.ends) - 1].name
            yield f"the head also reads the state after {units[apart[-1]].name}, which goes on beside that of {last}."
        if lost := [unit.name for unit in units[:-1] if not unit.output.layout.spatial]:
            yield f"the outputs of {', '.join(lost)} are not features on a grid."

    def _settle(self, step: Step) -> int:
        """Return the state after a residual sum: behind the activation or norm that the next unit reads it through."""
        total = self.joins.get(step.total, step.total)
        read = self._read_by_next(total)
        return self._follow_within_block(total) if read is None else read

    def _read_by_next(self, total: int) -> int | None:
        """Return what the next step reads of a state, if only norms and activations of its block lie between."""
        owner = self.record.values[total].call
        for other in self.steps:
            if self.record.depends(other.source, total):
                inside = self.record.between(total, other.source)
                light = all(value.op in _LIGHT and owner in value.call.chain() for value in inside)
                return origin(self.record, other.source) if light else None
        return None

    def _follow_within_block(self, total: int) -> int:
        """Return the last state of a block: behind its activations and, if other states are, behind a norm."""
        owner = self.record.values[total].call
        norms = int(self._is_post_norm)
        state, shown = total, {total}
        for value in self.record.values[total + 1 : owner.end or None]:
            if shown.isdisjoint(value.parents):
                continue
            if value.op in MOVES:
                shown.add(value.index)
                continue
            if value.op in NORMS and norms:
                norms -= 1
            elif value.op not in ACTIVATIONS:
                break
            state, shown = value.index, {value.index}
        return state

    @cached_property
    def _is_post_norm(self) -> bool:
        """True if every state that another step reads is read behind a norm, by the skip as well as by the branch."""
        reads = [(step.total, self._read_by_next(step.total)) for step in self.steps]
        between = [self.record.between(total, read) for total, read in reads if read is not None]
        return bool(between) and all(any(value.op in NORMS for value in inside) for inside in between)

    def _split(self, step: Step) -> list[Step]:
        """Return a step's branches as steps side by side, if each of them can be removed alone."""
        parts = split(self.record, step)
        sites = [self.locator.replace(part.branch, part.total if part.at is None else part.at) for part in parts]
        return [step] if any(site is None for site in sites) else parts

    def _enter(self, step: Step) -> int:
        """Return the state that a unit reads: before the norm and activation of a pre-activation block's own."""
        owner, value = self.record.values[step.total].call, self.record.values[step.source]
        totals = {other.total for other in self.steps}
        while value.op in _LIGHT and owner in value.call.chain() and value.index not in totals:
            seeing = [parent for index in value.parents if (parent := self.record.values[index]).places is not None]
            if not seeing:  # queries that have not seen the image yet, as those of a decoder
                break
            value = seeing[0]
        return self.locator.readable(value.index)

    def _residual(self, step: Step) -> Draft | None:
        """Return the unit of a residual step."""
        owner, end = self.record.values[step.total].call, self.settled[step.total]
        stretch = Stretch(self.record, step.source, step.branch, owner)
        before = self.locator.read(self._enter(step), [owner])
        after = self.locator.read(end, [owner]) or self.locator.read(step.total, [owner])
        unseeing = self.record.values[step.skip].places is None  # a token that comes from no image
        if before is None and after is not None and (after.layout.spatial or unseeing):
            before = self.locator.read_operand(step.skip, step.total)
        if before is None or after is None:
            return None
        unit = Unit("", stretch.kind, 0, stretch.module(), before, after, **self._find_residual(step))
        alone = sum(self.record.values[other.total].call is owner for other in self.steps) == 1
        if unit.module is None and alone and owner.path:
            unit = replace(unit, module=owner.module)
        unit = complete(unit, stretch, self.locator)
        later = Stretch(self.record, step.branch, end, owner).parameters()  # a scale, or a norm behind the sum
        return Draft(end, owner, replace(unit, parameters=tuple(dict.fromkeys((*(unit.parameters or ()), *later)))))

    def _find_residual(self, step: Step) -> dict[str, Any]:
        """Return residual and removal of a step's unit, as far as there are sites for them."""
        at = step.total if step.at is None else step.at
        if step.state is None:
            skip, branch = self.locator.read_operand(step.skip, step.total), self.locator.replace(step.branch, at)
        else:
            skip, branch = self.locator.read_change(step.skip, step.total, step.state)
        total = self.locator.read_exactly(step.total, [self.record.values[step.total].call])
        others = [self.locator.read_operand(*beside) for beside in step.beside]
        if branch is None or skip is None or total is None or None in others:
            return {}
        # They lie alike, whatever can be seen of each.
        skip, branch, *beside = (
            replace(site, layout=total.layout, arrangement=total.arrangement)
            for site in (skip, branch, *others)
            if site is not None
        )
        removal = None if step.again else Silence(branch)  # it would remove one of several runs
        residual = None if step.scaled else Residual(skip, branch, total, tuple(beside))
        return {"residual": residual, "removal": removal}

    def _gaps(self) -> Iterator[Draft]:
        """Yield the stem with the position embedding, and the units between residual steps."""
        if not self.steps:
            yield from self.chains.draft(self.image, self.output, from_image=True)
            return
        begun = plain = False
        seen = set()
        for step in self.steps:
            before = [other.total for other in self.steps if self.record.depends(step.source, other.total)]
            state = self._enter(step)
            if before:
                ends = (self.settled[before[-1]], state)
                if ends not in seen:  # steps side by side read the same state
                    found = list(self._between(*ends))
                    plain = plain or any(draft.unit.kind == "mlp" for draft in found)
                    yield from found
                seen.add(ends)
            elif not begun:
                begun = True
                yield from self._beginning(state)
        if plain:
            yield from self._after_last()

    def _between(self, first: int, last: int) -> Iterator[Draft]:
        """Yield the units from one state to the next that a residual step reads."""
        if first == last or not self.record.depends(last, first):
            return
        stretch = Stretch(self.record, first, last, self.root)
        changed = grid_of(self.record.values[first]) != grid_of(self.record.values[last])
        if stretch.mixers and stretch.is_nonlinear:
            yield from self.chains.draft(first, last)
        elif changed or stretch.mixers:
            end = end_before_position(stretch, self.locator)
            part = Stretch(self.record, first, last if end is None else end, self.root)
            before, after, call = self.locator.read(first), self.locator.read(part.last), part.widest_call()
            if before is not None and after is not None and call is not None:
                kind: Kind = "pool" if changed else part.kind
                unit = Unit("", kind, 0, call.module, before, after, parameters=part.parameters())
                yield Draft(part.last, call, unit, own=True)
            yield from draft_position(Stretch(self.record, part.last, last, self.root), self.locator)
        elif stretch.is_pointwise:
            yield from self._pointwise(stretch)
        else:
            yield from draft_position(stretch, self.locator)

    def _pointwise(self, stretch: Stretch) -> Iterator[Draft]:
        """Yield the MLP that a stretch without a residual is, such as the 1 x 1 convolution of a ConvMixer."""
        before, after, call = self.locator.read(stretch.first), self.locator.read(stretch.last), stretch.widest_call()
        if before is not None and after is not None and call is not None:
            unit = Unit("", "mlp", 0, call.module, before, after, removal=find_bypass(stretch))
            yield Draft(stretch.last, call, complete(unit, stretch, self.locator), own=True)

    def _after_last(self) -> Iterator[Draft]:
        """Yield the MLP behind the last residual step: what follows it on the grid, before pooling."""
        first = self.settled[self.steps[-1].total]
        state = first
        for value in Stretch(self.record, first, self.output, self.root).values:
            pointwise = value.mixing is None and value.op in _LIGHT | LAYERS and has_cells(value)
            if not pointwise or state not in value.parents:
                break
            state = value.index
        stretch = Stretch(self.record, first, state, self.root)
        if stretch.is_pointwise:
            yield from self._pointwise(stretch)

    def _beginning(self, last: int) -> Iterator[Draft]:
        """Yield the stem and the position embedding of a network with residual steps."""
        stretch = Stretch(self.record, self.image, last, self.root)
        attends = any(value.mixing == "attention" for value in stretch.mixers)
        if stretch.is_nonlinear and (attends or len(stretch.mixers) > _LONG_STEM):
            yield from self.chains.draft(self.image, last, from_image=True)
            return
        yield from self._stem(stretch)

    def _stem(self, stretch: Stretch) -> Iterator[Draft]:
        """Yield the stem, which ends before tokens or positions are added, and the position embedding."""
        end, before = end_before_position(stretch, self.locator), self.locator.read(self.image)
        after = None if end is None else self.locator.read(end)
        if end is None or before is None or after is None:
            return
        part = Stretch(self.record, self.image, end, self.root)
        call = part.widest_call()
        unit = Unit("stem", "stem", 0, None if call is None else call.module, before, after)
        yield Draft(end, self.root, replace(unit, parameters=part.parameters()), fixed="stem")
        yield from draft_position(Stretch(self.record, end, stretch.last, self.root), self.locator)

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


def _is_pooled(value: Value) -> bool:
    """Return True for features that describe no cell or token, and are not several of any other kind."""
    positions = [length for length in value.shape[1:] if length > 1]
    return _is_lost(value.places) and len(positions) < 2


def _is_arithmetic(record: Trace, step: Step) -> bool:
    """Return True for numbers that are added to each other as they are, such as the colours of an image."""
    branch = Stretch(record, step.source, step.branch, record.values[step.total].call)
    acting = any(value.op in LAYERS or value.op in NORMS or value.mixing for value in branch.values)
    return not acting and not branch.is_nonlinear and not branch.parameters()


def _is_of_stem(value: Value) -> bool:
    """Return True inside a module that says it is a stem (`is_stem`): it is one unit, whatever its layers."""
    return any(getattr(call.module, "is_stem", False) for call in value.call.chain())
