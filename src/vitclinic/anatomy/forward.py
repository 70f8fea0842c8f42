"""Forward passes that are watched: the contexts in which a network runs, and the additions of its own code.

A network runs in eval mode, uncompiled, or twice differentiable. A residual addition is often written between modules,
`x = x + self.gamma * self.attn(x)`, where no hook sees it. A torch function mode does, while the module that adds is
running; the addition is the n-th inside its call. All readers of one module share one mode.

Some code adds by other functions: `x - y`, `x.lerp(y, w)`, `torch.addcmul(x, gate, y)`, `torch.stack((x, y)).sum(0)`.
There the branch is no operand; it is the change, the result minus the state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import AnatomyError


def eager() -> AbstractContextManager[None]:
    """Run compiled modules as plain Python: a graph compiled earlier does not see hooks added later."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second or two
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def guard_hooks() -> None:
    """Let compiled graphs hold only for networks with the hooks that they were made with.

    By default torch does not look: a graph made of one network runs for all others of its class, whatever their hooks,
    and treatments are hooks. Graphs made until now are forgotten.
    """
    import torch._dynamo

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


_looking = threading.local()


@contextmanager
def look() -> Iterator[None]:
    """Mark what runs inside as a reader's, not the network's: it is neither counted nor recorded."""
    outer, _looking.now = is_looking(), True
    try:
        yield
    finally:
        _looking.now = outer


def is_looking() -> bool:
    """Return True while a reader of the network runs, inside its forward pass."""
    return getattr(_looking, "now", False)


def is_recomputing() -> bool:
    """Return True during a backward pass, in which checkpointed activations are computed a second time."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put a network into eval mode, and restore the mode of every module when the context ends.

    Args:
        network: The network.

    Example:
        >>> network = nn.Sequential(nn.Dropout())
        >>> with eval_mode(network):
        ...     print(network.training)
        False
        >>> network.training
        True
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def double_differentiable() -> Iterator[None]:
    """Run attention with a kernel that has second derivatives, in eager mode.

    Fused attention has neither a double backward nor forward-mode derivatives, on any device, so only the plain math
    kernel is allowed. This holds for each call inside the context, whatever timm chose when the network was built.
    Compiled networks run uncompiled.
    """
    with sdpa_kernel(SDPBackend.MATH), eager():
        yield


Operand = Literal["left", "right", "sum", "change"]
Act = Callable[[Tensor], Tensor | None]

_ADDING = frozenset((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__))
_CHANGING = ("sub", "subtract", "lerp", "addcmul", "addcdiv", "addmm", "baddbmm")
_REDUCING = frozenset((torch.sum, Tensor.sum, torch.mean, Tensor.mean))
ADDITIONS = _ADDING | _REDUCING | {getattr(torch, name) for name in _CHANGING}
ADDITIONS |= {getattr(Tensor, name + end) for name in _CHANGING for end in ("", "_")}
"""Functions that add, as a function mode sees them."""
_IN_PLACE = {Tensor.add_, Tensor.__iadd__} | {getattr(Tensor, f"{name}_") for name in _CHANGING}


def is_addition(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a function adds tensors; a number that is added counts nowhere.

    In training, and only there, BatchNorm counts its batches and stochastic depth adds a number to noise.
    """
    if func not in ADDITIONS:
        return False
    tensors = sum(isinstance(value, Tensor) for value in (*args, *(kwargs or {}).values()))
    return tensors > 1 or func in _REDUCING


class Removable(Protocol):
    """A hook that can be taken off again."""

    def remove(self) -> None: ...


def watch_addition(
    module: nn.Module,
    call: int,
    number: int,
    of: int | None,
    operand: Operand,
    within: nn.Module | None,
    act: Act,
    state: int = 0,
) -> Removable:
    """Call `act` with an operand or the result of an addition; if it returns a tensor, that replaces it.

    Args:
        module: The module inside whose call the addition is.
        call: Which call of the module in one call of `within`, from 0; ignored without `within`.
        number: Which addition inside the call, from 0.
        of: How many additions the call has; another number is an error, since the n-th is then another one.
        operand: `left` or `right`, `sum` for the result, or `change` for the result minus the state.
        within: The network, if it calls the module several times.
        act: The function to call.
        state: Which operand is the state, of a function that only changes it; of a stack, which entry.

    Returns:
        A handle; removing it stops it.
    """
    if module not in _modes:
        _modes[module] = _Additions(module)
    return _Watch(_modes[module], call, number, of, operand, within, act, state)


class _Watch:
    """One reader of an addition."""

    def __init__(
        self,
        mode: _Additions,
        call: int,
        number: int,
        of: int | None,
        operand: Operand,
        within: nn.Module | None,
        act: Act,
        state: int,
    ) -> None:
        self.call, self.number, self.of, self.operand, self.act = call, number, of, operand, act
        self.state = state
        self.counted = within is not None
        self.calls = 0
        self._restart = within.register_forward_pre_hook(self._begin) if within is not None else None
        self._mode = mode
        mode.add(self)

    def _begin(self, *_: Any) -> None:
        self.calls = 0

    def is_due(self, number: int) -> bool:
        return number == self.number and self.is_in_call()

    def is_in_call(self) -> bool:
        return not self.counted or self.calls == self.call + 1

    def remove(self) -> None:
        """Stop reading."""
        if self._restart is not None:
            self._restart.remove()
        self._mode.discard(self)


class _Additions(TorchFunctionMode):
    """Function mode of one module, active while it runs and is watched."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._watches: list[_Watch] = []
        self._hooks: list[Removable] = []
        self._numbers: list[int] = []
        """Additions so far, of each call under way."""

    def add(self, watch: _Watch) -> None:
        self._watches.append(watch)
        if not self._hooks:
            self._hooks = [
                self._module.register_forward_pre_hook(self._start, prepend=True),
                self._module.register_forward_hook(self._stop, always_call=True),
            ]

    def discard(self, watch: _Watch) -> None:
        self._watches = [other for other in self._watches if other is not watch]
        if not self._watches:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            _modes.pop(self._module, None)
            while self._numbers:  # an interrupt, unlike an error, skips the module's last hook
                self._stop()

    def _start(self, *_: Any) -> None:
        for watch in self._watches:
            watch.calls += 1
        self._numbers.append(0)
        self.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, _: Any = None, __: Any = None, output: Any = None) -> None:
        if self._numbers:
            number = self._numbers.pop()
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is None:  # an error ended the call before its last addition
                return
            expected = [watch.of for watch in self._watches if watch.of is not None and watch.is_in_call()]
            if expected and expected[0] != number:
                raise AnatomyError(
                    f"{type(self._module).__name__} added {number} times in this pass and {expected[0]} times when the "
                    "network was examined, so its additions cannot be told apart; it depends on the batch or the mode."
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self._numbers or not is_addition(func, args, kwargs) or is_looking():
            return func(*args, **kwargs)
        number = self._numbers[-1]
        self._numbers[-1] += 1
        due = [watch for watch in self._watches if watch.is_due(number)]
        if not due:
            return func(*args, **kwargs)
        if func not in _ADDING or any(watch.operand == "change" for watch in due):
            return _change(func, args, kwargs, due)
        named = [kwargs.pop(name) for name in ("input", "other") if name in kwargs]
        operands = [*args, *named]
        for watch in due:
            place = {"left": 0, "right": 1}.get(watch.operand)
            if place is not None and (replaced := watch.act(operands[place])) is not None:
                written = place == 0 and func in _IN_PLACE  # the caller may go on with the tensor, not with the result
                operands[place] = operands[place].copy_(replaced) if written else replaced
        return _end(func, func(*operands, **kwargs), due)


def _end(func: Any, result: Tensor, due: list[_Watch]) -> Tensor:
    """Show the result of an addition, and return what replaces it."""
    for watch in due:
        if watch.operand == "sum" and (replaced := watch.act(result)) is not None:
            result = result.copy_(replaced) if func in _IN_PLACE else replaced
    return result


def _change(func: Any, args: Any, kwargs: dict[str, Any], due: list[_Watch]) -> Tensor:
    """Call a function that changes a state, and show state and change to their readers."""
    states = {watch.state: _state(func, args, kwargs, watch.state) for watch in due}
    for watch in due:
        if watch.operand == "left":
            watch.act(states[watch.state])
    if func in _IN_PLACE:
        states = {place: state.clone() for place, state in states.items()}
    result: Tensor = func(*args, **kwargs)
    for watch in due:
        if watch.operand == "change":
            state = states[watch.state].reshape(result.shape)
            if (replaced := watch.act(result - state)) is not None:
                result = result.copy_(state + replaced) if func in _IN_PLACE else state + replaced
    return _end(func, result, due)


def _state(func: Any, args: Any, kwargs: dict[str, Any], place: int) -> Tensor:
    """Return the operand, or the entry of a stack, that a function changes."""
    first: Tensor = args[0] if args else kwargs["input"]
    if func in _REDUCING:
        axis: Any = args[1] if len(args) > 1 else kwargs["dim"]
        return first.select(axis if isinstance(axis, int) else axis[0], place)
    return first if place == 0 else args[1] if len(args) > 1 else kwargs["end"]  # of `lerp`


_modes: dict[nn.Module, _Additions] = {}
"""Modes of the modules that are watched now."""
