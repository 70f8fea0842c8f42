"""The record of one forward pass: every operation, where its tensors come from, and the module calls around it.

Operations are recorded below autograd, where each library's code has become the same few of them: attention in its
plain form is two products and a softmax, whatever it is called above. The functions that the network's own code calls
are recorded with them, so that an addition or an attention can be found again, in a later pass, as the n-th inside a
module's call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vitclinic.anatomy.forward import ADDITIONS, eager, eval_mode, is_addition, is_looking
from vitclinic.anatomy.maps import ATTENTION, PRODUCTS
from vitclinic.anatomy.observation.follow import follow
from vitclinic.anatomy.observation.places import FILLS, Mixing, Places, Step, places_of_image
from vitclinic.anatomy.wrappers import call_with_images

NORMS = frozenset(("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm"))
LAYERS = frozenset(("convolution", "mm", "addmm", "bmm", "baddbmm", "linear"))
"""Operations of normalization, and of layers with weights or attention."""
CHANGES = frozenset(("sub", "addcmul", "addcdiv", "addmm", "baddbmm"))
"""Operations that may change a state, their first argument, and of which the branch is no argument."""
_COUNTED = {"addition": ADDITIONS, "attention": ATTENTION, "product": PRODUCTS}
"""Functions by whose number inside a module's call a place is found again."""


@dataclass(eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    path: str
    number: int
    """Which of the module's calls it is, from 0."""
    parent: Call | None
    begin: int
    """Number of operations before it."""
    end: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Additions, attentions and products so far, those of inner modules included."""

    def chain(self) -> Iterator[Call]:
        """Yield this call and all around it, the innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True, eq=False)
class End:
    """A tensor as an input or output of a module call."""

    call: Call
    end: Literal["in", "out"]
    item: int


@dataclass(eq=False)
class Value:
    """A tensor of the pass, as one operation left it."""

    index: int
    op: str
    parents: tuple[int, ...]
    shape: tuple[int, ...]
    call: Call
    function: Callable[..., Any] | None
    """The function of the network's code that led to the operation."""
    numbers: dict[Call, int]
    """For an addition, an attention or a product: which one it is inside each call around it."""
    ancestors: int = 0
    """Bit set of the values that it is computed from, itself included."""
    places: Places | None = None
    """None if the value does not depend on the image."""
    mixing: Mixing | None = None
    weight: Tensor | None = None
    """The tensor, for a parameter, a buffer or a constant."""
    tensor: Tensor | None = None
    """The values themselves, of a softmax."""
    operands: tuple[tuple[int, Tensor], ...] = ()
    """Numbers and tensors that the network's own code multiplies, if that led to the operation."""
    ends: list[End] = field(default_factory=list)
    overwritten: bool = False
    """True if the network later wrote into the tensor."""
    joined: tuple[int, ...] = ()
    """States that it may change, where it adds otherwise than by a plain sum; of a stack, its entries."""
    axis: int = 0
    """Axis of a stack."""


def has_cells(value: Value) -> bool:
    """Return True if a value describes cells of the grid."""
    return value.places is not None and bool((value.places.cells >= 0).any())


class Trace:
    """Values of one forward pass in order, with the module calls that they passed."""

    image = 0
    """Which value the images are."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.outputs: list[int] = []

    def depends(self, value: int, on: int) -> bool:
        """Return True if a value is computed from another, or is it."""
        return bool(self.values[value].ancestors >> on & 1)

    def between(self, first: int, last: int) -> list[Value]:
        """Return the values computed from `first` on the way to `last`, which is included."""
        bits = self.values[last].ancestors >> (first + 1)
        found = []
        for offset in range(last - first):
            if bits >> offset & 1 and self.depends(first + 1 + offset, first):
                found.append(self.values[first + 1 + offset])
        return found

    @cached_property
    def workers(self) -> set[nn.Module]:
        """Modules with a layer in them: a convolution, a linear layer or attention."""
        return {call.module for value in self.values if value.op in LAYERS for call in value.call.chain()}

    @cached_property
    def norms(self) -> set[nn.Module]:
        """Modules that normalize and have no layer."""
        return {call.module for value in self.values if value.op in NORMS for call in value.call.chain()} - self.workers

    @cached_property
    def ends_of(self) -> dict[tuple[Call, str], list[Value]]:
        """Values that enter (`in`) and leave (`out`) each call, in order."""
        found: dict[tuple[Call, str], list[Value]] = {}
        for value in self.values:
            for end in value.ends:
                found.setdefault((end.call, end.end), []).append(value)
        return found


@torch.no_grad()
def trace(network: nn.Module, entrance: nn.Module, images: Tensor) -> Trace:
    """Record one forward pass.

    Args:
        network: The network whose modules are recorded.
        entrance: The module to call with the images: the network, or a wrapper of it.
        images: A batch that it takes; two images tell the axis of the images from others.
    """
    record = Trace(len(images))
    recorder = _Recorder(record, entrance)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            for context in (eval_mode(entrance), eager(), sdpa_kernel(SDPBackend.MATH), recorder.watch(network)):
                stack.enter_context(context)
            recorder.add_image(images)
            with _Functions(recorder), recorder:
                output = call_with_images(entrance, images)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    record.outputs = [recorder.index(leaf) for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]
    return record


def _plain(output: Any) -> Any:
    """Return the contents of an output object, such as a Hugging Face output or a dataclass."""
    if isinstance(output, Tensor | tuple | list):
        return output
    return dict(output) if isinstance(output, dict) else getattr(output, "__dict__", output)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operations."""

    def __init__(self, record: Trace, entrance: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.function: Callable[..., Any] | None = None
        self.numbers: dict[Call, int] = {}
        self.operands: tuple[tuple[int, Tensor], ...] = ()
        self.stack = [Call(entrance, "", 0, None, 0)]
        self._known: dict[int, int] = {}
        self._alive: list[Tensor] = []
        """Every tensor seen, so that no address is used twice."""
        self._sharing: dict[int, list[Tensor]] = {}
        """Tensors by their storage."""
        self._tokens = itertools.count()

    @contextmanager
    def watch(self, network: nn.Module) -> Iterator[None]:
        """Follow the calls of a network's modules."""
        counts: Counter[nn.Module] = Counter()
        paths = {module: name for name, module in network.named_modules()}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(module, paths[module], counts[module], self.stack[-1], len(self.record.values))
            counts[module] += 1
            self.record.calls.append(call)
            self.stack.append(call)
            self._note_ends(call, "in", (*args, *kwargs.values()))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            call = self.stack.pop()
            call.end = len(self.record.values)
            self._note_ends(call, "out", output if isinstance(output, tuple | list) else (output,))

        handles = []
        for module in paths:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_ends(self, call: Call, end: Literal["in", "out"], tensors: Any) -> None:
        for item, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                self.record.values[self.index(tensor)].ends.append(End(call, end, item))

    def add_image(self, images: Tensor) -> None:
        """Begin with the images."""
        self._add("image", (), images).places = places_of_image(images.shape)

    def index(self, tensor: Tensor) -> int:
        """Return the number of the value that a tensor is now; a tensor never seen is a weight or a constant."""
        if id(tensor) not in self._known:
            self._add("weight", (), tensor).weight = tensor
        return self._known[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        read = () if name in FILLS else _tensors((args, kwargs))
        parents = tuple(dict.fromkeys(self.index(tensor) for tensor in read))
        step = Step(name, func, args, kwargs, [], self._places, self.record.images, self._tokens)
        written = step.written
        result = func(*args, **kwargs)
        step.outputs.extend(written or _tensors(result))
        places, mixing = follow(step) if parents else ([], None)
        for number, output in enumerate(step.outputs):
            old = self._known.get(id(output))
            value = self._add("alias" if step.adds_nothing else step.name.removesuffix("_"), parents, output)
            value.places = places[number] if number < len(places) else None
            value.mixing = mixing
            value.tensor = output if "softmax" in value.op else None
            value.joined, value.axis = self._join(step, value)
            if written and old is not None:
                self._spread(output, old)
        return result

    def _join(self, step: Step, value: Value) -> tuple[tuple[int, ...], int]:
        """Return the states that an operation may change, and the axis on which a stack has them."""
        if value.op == "stack":
            axis = step.args[1] if len(step.args) > 1 else 0
            return tuple(self.index(tensor) for tensor in step.args[0]), axis % len(value.shape)
        first = self.record.values[value.parents[0]] if value.parents else value
        if value.op in ("sum", "mean") and first.op == "stack" and len(step.args) > 1:
            axes = step.args[1] if isinstance(step.args[1], list | tuple) else [step.args[1]]
            along = len(axes) == 1 and axes[0] % len(first.shape) == first.axis
            return (first.joined, 0) if along and value.shape == self.record.values[first.joined[0]].shape else ((), 0)
        scaled = value.op == "add" and step.kwargs.get("alpha", 1) != 1
        states = 2 if value.op == "lerp" else int(value.op in CHANGES or scaled)
        return value.parents[: sum(isinstance(tensor, Tensor) for tensor in step.args[:states])], 0

    def _places(self, value: Any) -> Places | None:
        known = self._known.get(id(value)) if isinstance(value, Tensor) else None
        return None if known is None else self.record.values[known].places

    def _add(self, op: str, parents: tuple[int, ...], tensor: Tensor) -> Value:
        values = self.record.values
        ancestors = 1 << len(values)
        for parent in parents:
            ancestors |= values[parent].ancestors
        value = Value(
            len(values), op, parents, tuple(tensor.shape), self.stack[-1], self.function, self.numbers, ancestors
        )
        value.operands = self.operands
        values.append(value)
        if id(tensor) not in self._known:
            self._alive.append(tensor)
            self._sharing.setdefault(_storage(tensor), []).append(tensor)
        self._known[id(tensor)] = value.index
        return value

    def _spread(self, tensor: Tensor, old: int) -> None:
        """Tensors that share memory with one that was written to have changed as well."""
        written = self._known[id(tensor)]
        self.record.values[old].overwritten = True
        for other in list(self._sharing[_storage(tensor)]):
            if other is not tensor:
                before = self.record.values[self._known[id(other)]]
                before.overwritten = True
                self._add("alias", (before.index, written), other).places = before.places


class _Functions(TorchFunctionMode):
    """Function mode that tells the recorder which function of the network's code runs, and numbers those it needs."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        counted = next((kind for kind, known in _COUNTED.items() if func in known), None)
        if is_looking() or (counted == "addition" and not is_addition(func, args, kwargs)):
            counted = None
        recorder.function, recorder.numbers, recorder.operands = func, {}, ()
        if counted == "product":
            recorder.operands = tuple((recorder.index(tensor), tensor) for tensor in _tensors((args, kwargs)))
        if counted is not None:
            recorder.numbers = {call: call.counts[counted] for call in recorder.stack}
            for call in recorder.stack:
                call.counts[counted] += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recorder.function, recorder.numbers, recorder.operands = None, {}, ()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
