"""Residual steps of a recorded forward pass: additions of a state and of what a branch makes of it.

An addition is residual if one operand is computed from the other (total = skip + branch), or if both are computed from
the same state and one of them only by linear layers (the projected skip of a ResNet). What lies between is a unit.
Where the code adds by another function (`lerp`, `addcmul`, a difference), the branch is what changes the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitclinic.anatomy.observation.trace import NORMS, Trace, Value

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


def find_steps(record: Trace) -> list[Step]:
    """Return the residual steps on the way to the output that are not part of another's branch, in order."""
    steps: list[Step] = []
    skips: dict[int, int] = {}
    reached = 0
    for output in record.outputs:
        reached |= record.values[output].ancestors
    for value in record.values:
        if reached >> value.index & 1:
            step = _step(record, value, skips) if _adds_alike(record, value) else _changed(record, value, skips)
            if step is not None:
                steps.append(step)
                skips[value.index] = step.skip
    return _once(record, _outermost(record, steps))


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
    for skip, branch in pairs:
        for state in _passed(record, skip, skips):
            if state != origin(record, branch) and record.depends(branch, state):
                return Step(skip, branch, value.index, state)
    return _projected(record, value)


def _changed(record: Trace, value: Value, skips: dict[int, int]) -> Step | None:
    """Return the step of a value that changes a state otherwise than by a plain sum."""
    if value.op == "stack" or value.places is None:
        return None
    operands = value.parents if len(value.parents) > 1 else value.joined
    for place, skip in enumerate(value.joined):
        others = [other for other in operands if other != skip and record.values[other].places is not None]
        alike = math.prod(record.values[skip].shape) == math.prod(value.shape)
        if not alike or any(origin(record, skip) in _passed(record, other, skips) for other in others):
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


def _projected(record: Trace, value: Value) -> Step | None:
    """Return the step whose skip is a linear function of the state that both operands are computed from."""
    first, second = value.parents[:2]
    if any(record.values[operand].places is None for operand in (first, second)):
        return None
    common = record.values[first].ancestors & record.values[second].ancestors
    while common:
        source = common.bit_length() - 1
        if record.values[source].places is not None:
            break
        common ^= 1 << source
    else:
        return None
    if record.values[source].op == "image":
        return None
    inside = [record.between(source, operand) for operand in (first, second)]
    linear = [all(part.op in _LINEAR and part.mixing != "attention" for part in parts) for parts in inside]
    if linear[0] == linear[1]:
        return None
    skip, branch = (first, second) if linear[0] else (second, first)
    return Step(skip, branch, value.index, source)


def _outermost(record: Trace, steps: list[Step]) -> list[Step]:
    return [step for step in steps if not any(_is_inside(record, step, other) for other in steps)]


def _once(record: Trace, steps: list[Step]) -> list[Step]:
    """Return the steps without those of further runs of the same code on the same images, as in a flipped copy."""
    kept: list[Step] = []
    for step in steps:
        value = record.values[step.total]
        twins = [other for other in kept if _is_same_code(record.values[other.total], value)]
        apart = [other for other in twins if not record.depends(step.source, other.total)]
        kept = [replace(other, again=True) if other in apart else other for other in kept]
        if not apart:
            kept.append(step)
    return kept


def _is_same_code(one: Value, other: Value) -> bool:
    return one.call.module is other.call.module and one.numbers.get(one.call) == other.numbers.get(other.call)


def _is_inside(record: Trace, step: Step, other: Step) -> bool:
    """Return True if `step` is part of the branch of `other`."""
    return (
        step is not other
        and step.total < other.total
        and record.depends(other.branch, step.total)
        and record.depends(step.source, other.source)
        and step.total != origin(record, other.source)
    )
