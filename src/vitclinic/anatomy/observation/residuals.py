"""Residual steps of a recorded forward pass, and the stretches between two of its values.

An addition is residual if one operand is computed from the other (total = skip + branch), or if both are computed from
the same state and one of them only by linear layers (the projected skip of a ResNet). What lies between is a unit. A
stretch of the pass tells how it mixes cells, and the modules that do its work.

Where the code adds by another function (`lerp`, `addcmul`, a difference), the branch is what changes the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from vitclinic.anatomy.observation.places import MIXED
from vitclinic.anatomy.observation.trace import LAYERS, NORMS, Call, Trace, Value
from vitclinic.anatomy.removal import Bypass
from vitclinic.anatomy.units import Kind

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


ACTIVATIONS = frozenset(
    (
        *("relu", "gelu", "silu", "hardswish", "leaky_relu", "elu", "hardtanh", "tanh", "mish", "celu", "selu"),
        *("sigmoid", "hardsigmoid", "softplus", "clamp", "clamp_min", "prelu", "_prelu_kernel", "relu6", "threshold"),
    )
)
MIXERS = ("conv", "attention", "matrix")
_KINDS: dict[str, Kind] = {"attention": "msa", "matrix": "token_mlp", "conv": "conv", "context": "msa", "pool": "pool"}
"""Kinds of unit by what mixes cells in it, the most telling first."""


@dataclass(frozen=True)
class Stretch:
    """What a pass computes from the value `first` on the way to `last`, inside the module call `around`."""

    record: Trace
    first: int
    last: int
    around: Call

    @cached_property
    def values(self) -> list[Value]:
        """Values in order, the last one included."""
        return self.record.between(self.first, self.last)

    @property
    def kind(self) -> Kind:
        """Kind of the unit that this stretch is: by the way it mixes cells, or an MLP if it does not."""
        mixing = {value.mixing for value in self.values}
        return next((kind for mix, kind in _KINDS.items() if mix in mixing), "mlp")

    @property
    def mixers(self) -> list[Value]:
        """Convolutions larger than 1 x 1, attentions, and fixed matrices along cells."""
        return [value for value in self.values if value.mixing in MIXERS]

    @property
    def is_nonlinear(self) -> bool:
        """True if an activation function is part of it."""
        return any(value.op in ACTIVATIONS for value in self.values)

    def calls(self) -> list[Call]:
        """Return the outermost module calls inside the stretch, in order."""
        found: dict[Call, None] = {}
        for value in self.values:
            inner = [call for call in value.call.chain() if call.begin > self.first and call is not self.around]
            if inner and self.around in value.call.chain():
                inside = [call for call in inner if self.around in call.chain()]
                if inside:
                    found[inside[-1]] = None
        return list(found)

    def contains(self, call: Call) -> bool:
        """Return True if a call begins and ends inside the stretch."""
        outputs = self.record.ends_of.get((call, "out"), [])
        return self.first < call.begin and bool(outputs) and outputs[0].index <= self.last

    def widest_call(self) -> Call | None:
        """Return the widest module call inside, around the last mixer or else the last layer."""
        layers = [value for value in self.values if value.op in LAYERS]
        for value in (self.mixers or layers or self.values)[-1:]:
            inside = [call for call in value.call.chain() if self.contains(call)]
            if inside:
                return inside[-1]
        return None

    def module(self) -> nn.Module | None:
        """Return the one module that does the work, norms apart; None if there is no such module."""
        modules = dict.fromkeys(call.module for call in self.calls())
        working = [module for module in modules if module in self.record.workers]
        return working[0] if len(working) == 1 else None

    def norm(self) -> nn.Module | None:
        """Return the norm, or the scaling in its place, that is not part of the module that does the work."""
        calls = self.calls()
        norms = [call.module for call in calls if call.module in self.record.norms]
        if norms:
            return norms[0]
        first = calls[0].module if calls else None
        return (
            first
            if first not in self.record.workers and first is not None and next(first.parameters(), None) is not None
            else None
        )

    def activation(self) -> int | None:
        """Return the output of the last activation function that a layer follows: the hidden neurons of an MLP."""
        layers = [value.index for value in self.values if value.op in LAYERS]
        for value in reversed(self.values):
            # A gate of channels describes no token; nor does what a matrix has mixed.
            told = value.places is not None and bool((value.places.cells != MIXED).any())
            counts = told or self.kind == "token_mlp"
            if value.op in ACTIVATIONS and counts and layers and value.index < layers[-1]:
                return self._output_of_activation(value)
        return None

    def _output_of_activation(self, value: Value) -> int:
        """Return what an activation's module makes of it, as in x * sigmoid(x); without a module, the value itself."""
        for call in value.call.chain():
            if call.module not in self.record.workers and (outputs := self.record.ends_of.get((call, "out"))):
                return outputs[0].index
        return value.index

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters that the stretch uses."""
        found: dict[nn.Parameter, None] = {}
        for value in self.values:
            for parent in value.parents:
                if self.record.values[parent].places is None:
                    found |= dict.fromkeys(weights_behind(self.record, parent))
        return tuple(found)


def weights_behind(record: Trace, index: int) -> list[nn.Parameter]:
    """Return the parameters that a value is computed from."""
    bits = record.values[index].ancestors
    found = []
    while bits:
        lowest = (bits & -bits).bit_length() - 1
        bits &= bits - 1
        weight = record.values[lowest].weight
        if isinstance(weight, nn.Parameter):
            found.append(weight)
    return found


def has_detour(record: Trace, first: int, last: int, around: int) -> bool:
    """Return True if `last` is computed from `first` also on a way that does not lead through `around`."""
    seen, left = {around}, [last]
    while left:
        value = left.pop()
        if value == first:
            return True
        if value not in seen:
            seen.add(value)
            left += [parent for parent in record.values[value].parents if record.depends(parent, first)]
    return False


def find_bypass(part: Stretch) -> Bypass | None:
    """Return the removal of a lone convolution that keeps the number of its feature maps, and their size or a part."""
    mixers = part.mixers
    conv = mixers[0].call.module if len(mixers) == 1 else None
    if not isinstance(conv, nn.Conv2d) or conv.in_channels != conv.out_channels:
        return None
    source = part.record.values[mixers[0].parents[0]]
    every = zip(source.shape[-2:], conv.stride, strict=True)
    kept = tuple(-(-length // step) for length, step in every)
    return Bypass(conv) if kept == tuple(mixers[0].shape[-2:]) else None
