"""Replacement of every GELU of a network by ReLU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import run_under
from vitclinic.treatments.parts import missing, run_once
from vitclinic.treatments.treatment import Treatment, register


def gelu_to_relu(network: nn.Module) -> int:
    """Replace every GELU of any network by ReLU, in place.

    A GELU is a module with "gelu" in the name of its class (PyTorch's, timm's and Hugging Face's, exact or
    approximate), or `torch.nn.functional.gelu` stored by a module as its activation. A GELU called by name in a
    `forward` is not found by this function, but by the treatment, which runs the network.

    Args:
        network: Any network, of a known family or not.

    Returns:
        The number of replaced activations.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> gelu_to_relu(network)
        1
        >>> network[1]
        ReLU()
    """
    replaced = 0
    for parent in list(network.modules()):
        for name, child in parent._modules.items():
            if child is not None and is_gelu(child):
                parent._modules[name] = nn.ReLU()
                replaced += 1
        for name, value in list(vars(parent).items()):
            if _is_functional_gelu(value):
                setattr(parent, name, F.relu)
                replaced += 1
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 1  # selects its fast path: 1 is ReLU
    return replaced


def is_gelu(module: nn.Module) -> bool:
    """Tell whether a module is a GELU of any kind, by the name of its class."""
    return "gelu" in type(module).__name__.lower()


def _is_functional_gelu(value: Any) -> bool:
    return value is F.gelu or (isinstance(value, functools.partial) and value.func is F.gelu)


@register
class ReluActivation(Treatment):
    """Every GELU replaced by ReLU, the setting in which [chen2022 App. G] compares condition numbers of the NTK."""

    name: ClassVar[str] = "relu_activation"
    paper: ClassVar[str] = "chen2022 App. G; wang2022 Table 5"
    changes: ClassVar[str] = "every GELU becomes a ReLU"
    costs: ClassVar[str] = "no parameters; no more time than with GELU"
    part: ClassVar[str] = "a GELU"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        replaced = gelu_to_relu(network)
        callers = find_gelu_callers(network, spec)
        for module in callers:
            run_under(GeluToRelu, module)
        if not replaced and not callers:
            raise missing(self, network, "this network calls none, as a module or a function")
        return network


class GeluToRelu(TorchFunctionMode):
    """Function mode in which a call of GELU computes ReLU."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return F.relu(args[0]) if func is F.gelu else func(*args, **(kwargs or {}))


class _Listener(TorchFunctionMode):
    """Function mode that notes the innermost module that runs when GELU is called."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.callers: dict[nn.Module, None] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        self.running.append(module)

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.gelu and self.running:
            self.callers[self.running[-1]] = None
        return func(*args, **(kwargs or {}))


def find_gelu_callers(network: nn.Module, spec: ImageSpec) -> list[nn.Module]:
    """Return the modules whose forward calls GELU as a function."""
    listener = _Listener()
    handles = []
    for module in network.modules():
        handles.append(module.register_forward_pre_hook(listener.enter))
        handles.append(module.register_forward_hook(listener.leave))
    try:
        with listener:
            run_once(network, spec)
    finally:
        for handle in handles:
            handle.remove()
    return list(listener.callers)
