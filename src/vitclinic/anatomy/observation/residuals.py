"""Residual steps of a recorded forward pass.

An addition is residual if one operand is computed from the other (total = skip + branch), or if both are computed from
the same state and one of them only by linear layers (the projected skip of a ResNet). What lies between is a unit.

Where the code adds by another function (`lerp`, `addcmul`, a difference), the branch is what changes the state.

Two sums that contain the same state are steps side by side, and what adds or interpolates them joins their states: it
is no step. Nor is a long skip: a sum that an operand contains already, or one around several blocks. A state that goes
on beside another, as in a reversible network, is no part of the other's branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitclinic.anatomy.observation.stretch import Stretch, has_detour
from vitclinic.anatomy.observation.trace import LAYERS, NORMS, Trace, Value, has_cells

MOVES = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "clone", "contiguous"),
        *("alias", "detach", "_to_copy", "squeeze", "unsqueeze"),
    )
)
"""Operations that show the same numbers in another arrangement."""
_LINEAR = (
    MOVES | NORMS | {"convolution", "mm", "addmm", "bmm", "linear", "avg_pool2d", "max_pool2d_with_indices", "mul"}
)
_LINEAR |= {"constant_pad_nd", "slice", "select", "cat", "split", "split_with_sizes", "expand", "mean", "roll", "index"}
_LINEAR |= {"_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d", "amax", "max"}


@dataclass(frozen=True)
class Step:
    """A residual step, by the numbers of its values: total = skip + branch."""

    skip: int
    branch: int
    total: int
    source: int
    """The value that the branch is computed from: the skip itself, or what a projected skip is computed from too."""
    again: bool = False
    """True if the same code runs again on the same images, apart from this run."""
    state: int | None = None
    """Which state the total changes, where it adds otherwise than by a plain sum; the branch is then the total."""
    at: int | None = None
    """The sum that the branch is an operand of, if branches are added to each other before they are to the state."""
    beside: tuple[tuple[int, int], ...] = ()
    """Those other branches, each with the sum that it is an operand of."""
    scaled: bool = False
    """True if their sum is scaled or normalized, so that total = skip + branch holds for none of them."""


def find_steps(record: Trace, output: int) -> list[Step]:
    """Return the residual steps on the way to the output that are not part of another's branch, in order.

    Args:
        record: The recorded pass.
        output: Which of its values is the network's output.
    """
    steps: list[Step] = []
    skips: dict[int, int] = {}
    reached = 0
    for index in record.outputs:
        reached |= record.values[index].ancestors
    for value in record.values:
        if reached >> value.index & 1:
            step = _step(record, value, skips) if _adds_alike(record, value) else _changed(record, value, skips)
            if step is not None:
                steps.append(step)
                skips[value.index] = step.skip
    kept = _outermost(record, [step for step in steps if not _is_long(record, step, steps, output)], output)
    return _once(record, [replace(step, source=_latest_state(record, step, kept)) for step in kept])


def find_joins(record: Trace, steps: list[Step]) -> dict[int, int]:
    """Return the sums that join the states of steps side by side, by the total of the last of these steps."""
    skips = {step.total: step.skip for step in steps}
    found: dict[int, int] = {}
    for value in record.values:
        operands = value.joined or (value.parents[:2] if _adds_alike(record, value) else ())
        totals = sorted({_behind_scales(record, operand) for operand in operands})
        if len(totals) == 2 and skips.keys() >= set(totals) and _are_side_by_side(record, totals[0], totals[1], skips):
            found[totals[1]] = _scaled_later(record, value)
    return found


def _scaled_later(record: Trace, value: Value) -> int:
    """Return the last of the values that a sum becomes by factors, each of which is all that is made of it."""
    readers = [other for other in record.values[value.index + 1 :] if value.index in other.parents]
    while len(readers) == 1 and _behind_scales(record, readers[0].index) == _behind_scales(record, value.index):
        value = readers[0]
        readers = [other for other in record.values[value.index + 1 :] if value.index in other.parents]
    return value.index


def origin(record: Trace, index: int) -> int:
    """Return the value that another shows in a different arrangement."""
    value = record.values[index]
    while value.op in MOVES and value.parents:
        value = record.values[value.parents[0]]
    return value.index


def _adds_alike(record: Trace, value: Value) -> bool:
    """Return True for an image-dependent sum of two tensors of its own size."""
    if value.op != "add" or value.joined or len(value.parents) < 2 or value.places is None:
        return False
    return all(math.prod(record.values[parent].shape) == math.prod(value.shape) for parent in value.parents[:2])


def _step(record: Trace, value: Value, skips: dict[int, int]) -> Step | None:
    pairs = [value.parents[:2], value.parents[1::-1]]
    if any(origin(record, one) in _passed(record, other, skips) for one, other in pairs):
        return None  # a long skip: an operand contains the other already
    if _are_side_by_side(record, value.parents[0], value.parents[1], skips):
        return None
    for skip, branch in pairs:
        for state in _passed(record, skip, skips):
            if state != origin(record, branch) and record.depends(branch, state):
                streams = not all(record.depends(part, state) for part in _passed(record, branch, skips))
                return None if streams else Step(skip, branch, value.index, state)
    return _projected(record, value)


def _changed(record: Trace, value: Value, skips: dict[int, int]) -> Step | None:
    """Return the step of a value that changes a state otherwise than by a plain sum."""
    if value.op == "stack" or value.places is None:
        return None
    operands = value.parents if len(value.parents) > 1 else value.joined
    for place, skip in enumerate(value.joined):
        others = [other for other in operands if other != skip and record.values[other].places is not None]
        alike = math.prod(record.values[skip].shape) == math.prod(value.shape)
        pairs = [pair for other in others for pair in ((skip, other), (other, skip))]
        if not alike or any(origin(record, one) in _passed(record, other, skips) for one, other in pairs):
            continue  # one contains the other already
        if any(_are_side_by_side(record, skip, other, skips) for other in others):
            continue
        for state in _passed(record, skip, skips):
            if any(state != origin(record, other) and record.depends(other, state) for other in others):
                return Step(skip, value.index, value.index, state, state=place)
    return None


def _passed(record: Trace, skip: int, skips: dict[int, int]) -> Iterator[int]:
    """Yield a state and the states before it that it contains unchanged, as a sum contains its skip."""
    state: int | None = origin(record, skip)
    while state is not None:
        yield state
        state = origin(record, skips[state]) if state in skips else None


def _are_side_by_side(record: Trace, one: int, other: int, skips: dict[int, int]) -> bool:
    """Return True if two values contain the same state unchanged, and neither contains the other."""
    passed = [list(_passed(record, value, skips)) for value in (one, other)]
    return not set(passed[0]).isdisjoint(passed[1]) and passed[0][0] not in passed[1] and passed[1][0] not in passed[0]


def _behind_scales(record: Trace, index: int) -> int:
    """Return the value that another is but for its arrangement, and for factors that do not depend on the image."""
    value = record.values[index]
    while value.parents and (value.op in MOVES or value.op in ("mul", "div")):
        dependent = [parent for parent in value.parents if record.values[parent].places is not None]
        if len(dependent) != 1:
            break
        value = record.values[dependent[0]]
    return value.index


def _projected(record: Trace, value: Value) -> Step | None:
    """Return the step whose skip is a linear function of the state that both operands are computed from."""
    first, second = value.parents[:2]
    if any(record.values[operand].places is None for operand in (first, second)):
        return None
    source = _common_state(record, first, second)
    if source is None or record.values[source].op == "image":
        return None
    inside = [record.between(source, operand) for operand in (first, second)]
    linear = [all(part.op in _LINEAR and part.mixing != "attention" for part in parts) for parts in inside]
    if linear[0] == linear[1]:
        return None
    skip, branch = (first, second) if linear[0] else (second, first)
    return Step(skip, branch, value.index, source)


def _common_state(record: Trace, first: int, second: int) -> int | None:
    """Return the last value that all of two values is computed from, as far as they depend on the image.

    A gate, such as that of t f(x) + (1 - t) x, is not: x comes in beside it.
    """
    common = record.values[first].ancestors & record.values[second].ancestors
    while common:
        source = common.bit_length() - 1
        if record.values[source].places is not None:
            around = any(has_detour(record, record.image, operand, source) for operand in (first, second))
            if not around or source == record.image:
                return source
        common ^= 1 << source
    return None


def _is_long(record: Trace, step: Step, steps: list[Step], output: int) -> bool:
    """Return True for a skip around a part of the network, and not around a unit.

    Such a part has residual steps one after the other in modules of its own, with weights (a rotation of queries by
    their positions has none), or several convolutions on coarser grids than the sum's.
    """
    value = record.values[step.total]
    inside = [
        other
        for other in steps
        if (owner := record.values[other.total].call) is not value.call
        and value.call in owner.chain()
        and _is_inside(record, other, step, output)
        and _weights(record, other)
    ]
    if any(record.depends(other.source, one.total) for one in inside for other in inside if other is not one):
        return True
    branch = Stretch(record, step.source, step.branch, value.call)
    grids = [part.places.grid for part in branch.mixers if part.places is not None and has_cells(part)]
    cells = math.inf if value.places is None else math.prod(value.places.grid)
    coarser = any(math.prod(grid) < cells for grid in grids)  # a strided block works on finer grids than its sum's
    return branch.is_nonlinear and coarser and sum(part.mixing == "conv" for part in branch.mixers) > 2


def _outermost(record: Trace, steps: list[Step], output: int) -> list[Step]:
    return [step for step in steps if not any(_is_inside(record, step, other, output) for other in steps)]


def _latest_state(record: Trace, step: Step, steps: list[Step]) -> int:
    """Return the state that a branch is computed from: another step's total, if it reads that alone."""
    for other in reversed(steps):
        if (
            other.total not in (step.total, origin(record, step.source))
            and record.depends(step.branch, other.total)
            and record.depends(other.total, step.source)
            and not has_detour(record, step.source, step.branch, other.total)
        ):
            return other.total
    return step.source


def _once(record: Trace, steps: list[Step]) -> list[Step]:
    """Return the steps without those of further runs of the same code on the same images, as in a flipped copy."""
    kept: list[Step] = []
    weights = {step.total: _weights(record, step) for step in steps}
    for step in steps:
        value = record.values[step.total]
        twins = [
            other
            for other in kept
            if _is_same_code(record.values[other.total], value)
            or (weights[step.total] and weights[other.total] == weights[step.total] and _are_alike(record, other, step))
        ]
        apart = [other for other in twins if not record.depends(step.source, other.total)]
        kept = [replace(other, again=True) if other in apart else other for other in kept]
        if not apart:
            kept.append(step)
    return kept


def _weights(record: Trace, step: Step) -> frozenset[int]:
    """Return the parameters that a branch uses."""
    branch = Stretch(record, step.source, step.branch, record.values[step.total].call)
    return frozenset(id(parameter) for parameter in branch.parameters())


def _are_alike(record: Trace, one: Step, other: Step) -> bool:
    return record.values[one.total].shape == record.values[other.total].shape


def _is_same_code(one: Value, other: Value) -> bool:
    return one.call.module is other.call.module and one.numbers.get(one.call) == other.numbers.get(other.call)


def _is_inside(record: Trace, step: Step, other: Step, output: int) -> bool:
    """Return True if `step` is part of the branch of `other`, and its state does not go on beside that."""
    return (
        step is not other
        and step.total < other.total
        and record.depends(other.branch, step.total)
        and record.depends(step.source, other.source)
        and step.total != origin(record, other.source)
        and not has_detour(record, step.total, output, other.total)
    )


def split(record: Trace, step: Step) -> list[Step]:
    """Return the steps side by side of which a step is made: the branches that it adds to each other first.

    Branches are told apart if they have layers of their own and mix cells in different ways: several attentions, MLPs
    (experts) or convolutions that are added are one branch.
    """
    if step.state is not None:
        return [step]
    found = _addends(record, step.source, step.branch, step.total)
    parts = sorted(found, key=lambda part: origin(record, part[0]))
    owner = record.values[step.total].call
    stretches = [Stretch(record, step.source, branch, owner) for branch, _ in parts]
    kinds = [stretch.kind for stretch in stretches]
    layers = [{value.index for value in stretch.values if value.op in LAYERS} for stretch in stretches]
    linear = not any(kind == "msa" or part.is_nonlinear for kind, part in zip(kinds, stretches, strict=True))
    apart = all(own - set().union(*layers[:n], *layers[n + 1 :]) for n, own in enumerate(layers))
    if len(set(kinds)) < 2 or linear or not apart:
        return [step]
    outermost = max(at for _, at in parts)
    scaled = outermost != origin(record, step.branch)
    return [
        replace(step, branch=branch, at=at, beside=tuple(part for part in parts if part[0] != branch), scaled=scaled)
        for branch, at in parts
    ]


def _addends(record: Trace, source: int, branch: int, total: int) -> Iterator[tuple[int, int]]:
    """Yield the values that a branch is the sum of, each with the sum that it is an operand of."""
    value = record.values[_behind_scales(record, branch)]
    while value.op in NORMS:
        value = record.values[_behind_scales(record, value.parents[0])]
    operands = value.joined if value.op == "sum" else value.parents[:2] if _adds_alike(record, value) else ()
    apart = len(operands) > 1 and not any(
        record.depends(one, other) for one in operands for other in operands if one != other
    )
    if value.index != source and apart and all(record.depends(operand, source) for operand in operands):
        for operand in operands:
            yield from _addends(record, source, operand, value.index)
    else:
        yield branch, total
