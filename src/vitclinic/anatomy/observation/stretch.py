"""Stretches between two values of a recorded pass: how they mix cells, and the modules that do their work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from vitclinic.anatomy.observation.places import MIXED
from vitclinic.anatomy.observation.trace import LAYERS, Call, Trace, Value, has_cells
from vitclinic.anatomy.removal import Bypass
from vitclinic.anatomy.units import Kind

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
        joined: Kind = "msa" if "choice" in mixing else "token_mlp"  # of cells that the image decides on, or of fixed
        return next((kind for mix, kind in _KINDS.items() if mix in mixing), joined if "join" in mixing else "mlp")

    @property
    def mixers(self) -> list[Value]:
        """Convolutions larger than 1 x 1, attentions, and fixed matrices along cells."""
        return [value for value in self.values if value.mixing in MIXERS]

    @property
    def is_nonlinear(self) -> bool:
        """True if an activation function is part of it."""
        return any(value.op in ACTIVATIONS for value in self.values)

    @property
    def is_pointwise(self) -> bool:
        """True if layers and an activation function work on each cell by itself, as in an MLP.

        The layers of a squeeze and excitation do not: they work on the mean of all cells.
        """
        layered = any(value.op in LAYERS and has_cells(value) for value in self.values)
        return layered and self.is_nonlinear and all(value.mixing is None for value in self.values)

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
    mixers = part.mixers or [value for value in part.values if value.op in LAYERS]
    conv = mixers[0].call.module if len(mixers) == 1 else None
    if not isinstance(conv, nn.Conv2d) or conv.in_channels != conv.out_channels:
        return None
    source = part.record.values[mixers[0].parents[0]]
    every = zip(source.shape[-2:], conv.stride, strict=True)
    kept = tuple(-(-length // step) for length, step in every)
    return Bypass(conv) if kept == tuple(mixers[0].shape[-2:]) else None
