"""Digest of a network: its modules with their settings, hooks and code, and its tensors.

Code is hashed as the bytecode that runs, not as source files, which may have been edited since. Classes and functions
of libraries, and of vitclinic, count by name only. Nothing depends on memory addresses: the digest is the same in every
process with the same version of Python.
"""

from __future__ import annotations

import dis
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = sys.stdlib_module_names | {"numpy", "timm", "torch", "torchvision", "transformers", "vitclinic"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes in which every module keeps its parts, flags and hooks."""
RENAMED = {
    "vitclinic.models.factory.Normalised": "vitclinic.models.normalised.Normalised",
    "vitclinic.models.factory.Normalized": "vitclinic.models.normalised.Normalised",
    "vitclinic.treatments.attention_edit._forward": "vitclinic.treatments.function_mode._forward",
    "vitclinic.treatments.neighbourhood.SeenNeighbourhood": "vitclinic.treatments.seen_masks.SeenNeighbourhood",
    "vitclinic.treatments.neighbourhood.SeenPairs": "vitclinic.treatments.seen_masks.SeenPairs",
}
"""Names of classes and functions inside networks, now and before: digests stay the same, so stored results are found.
"""
_PLAIN = (bool, int, float, complex, str, bytes, Enum, PurePath, torch.dtype, torch.device, torch.Size, type(None))


def network_digest(network: nn.Module) -> str:
    """Return the SHA-256 of a network's repr, its modules' settings, hooks and own code, and its tensors.

    Attributes assigned by a forward pass or a hook, such as counters, are not settings. Code counts if `forward`
    reaches it through its own class, globals or closures; a function called through another module
    (`mymodule.function(x)`) does not.
    """
    identity = _Identity(network)
    identity.add(_describe(network))
    identity.add(network)
    return identity.digest.hexdigest()


def _describe(network: nn.Module) -> str:
    """Return the network's repr, without memory addresses and with the names of 0.1."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(network))
    for today, before in RENAMED.items():
        text = re.sub(rf"\b{today.rpartition('.')[2]}\(", f"{before.rpartition('.')[2]}(", text)
    return text


class _Identity:
    """Hash of objects of any kind, each counted once."""

    def __init__(self, network: nn.Module) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, object] = {}
        hooks = [hook for module in network.modules() for hook in _hooks(module)]
        self._state = {name for hook in hooks for name in _hook_attributes(hook)}

    def add(self, value: object) -> None:
        """Hash `value`, as far as it is the same in another process."""
        if isinstance(value, Tensor):
            self._write(f"{value.dtype} {tuple(value.shape)}")
            self.digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._write(f"{value.dtype} {value.shape}")
            self.digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, _PLAIN):
            self._write(repr(value))
        elif id(value) in self._seen:
            self._write(_name(value))
        else:
            self._seen[id(value)] = value  # kept, so that no other object gets its id
            self._write(_name(value))
            for part in self._parts(value):
                self.add(part)

    def _write(self, text: str) -> None:
        self.digest.update(f"{text}\0".encode(errors="surrogatepass"))

    def _parts(self, value: Any) -> Iterator[object]:
        if isinstance(value, tuple | list):
            yield from value
        elif isinstance(value, dict):
            yield from (part for item in value.items() for part in item)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(repr, value)) if all(isinstance(item, _PLAIN) for item in value) else ()
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            yield from () if _of_library(value) else _function_parts(value)
        elif isinstance(value, CodeType):
            yield from (value.co_code, value.co_varnames, value.co_names, *value.co_consts)
        elif isinstance(value, type):
            yield from () if _of_library(value) else (*value.__bases__, *_methods(value))
        elif isinstance(value, nn.Module):
            yield from self._module_parts(value)
        elif not _of_library(type(value)):
            yield type(value)
            yield from _settings(value, self._state)

    def _module_parts(self, module: nn.Module) -> Iterator[object]:
        yield from (type(module), type(module).forward)  # a library's forward may have been replaced
        yield from _settings(module, self._state)
        yield from _hooks(module)
        tensors = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
        yield from (part for item in sorted(tensors.items()) for part in item)
        yield from (tensor.dequantize() for tensor in unpack_weights(module))
        yield from (part for item in module.named_children() for part in item)


def _of_library(value: type | FunctionType) -> bool:
    # A decorated function has the __module__ of the function it wraps, but its own globals.
    module = value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__
    return str(module).partition(".")[0] in _LIBRARIES


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    library = not isinstance(named, type | FunctionType) or _of_library(named)
    if not library:
        return str(named.__qualname__)
    full = f"{named.__module__}.{named.__qualname__}"
    for today, before in RENAMED.items():
        if full == today or full.startswith(f"{today}."):
            return before + full[len(today) :]
    return full


def _hooks(module: nn.Module) -> list[Any]:
    own = vars(module).get("forward")
    return [hook for table in _HOOKS for hook in getattr(module, table).values()] + ([] if own is None else [own])


def _settings(value: Any, state: set[str]) -> Iterator[object]:
    """Yield the attributes of an object and their values, without those that change as it is used."""
    changing = state | _state_attributes(type(value))  # type: ignore[arg-type]  # classes are hashable
    changing |= getattr(type(value), "descriptive", frozenset()) if isinstance(value, nn.Module) else frozenset()
    for name, setting in sorted(getattr(value, "__dict__", {}).items()):
        if name not in changing and not (isinstance(value, nn.Module) and name in _INTERNAL):
            yield from (name, setting)


def _methods(kind: type) -> Iterator[object]:
    """Yield the members of a class by name: functions, also those inside properties and the like, and values."""
    for name, member in sorted(vars(kind).items()):
        if not name.startswith("__") or isinstance(member, FunctionType):
            inner = (getattr(member, key, None) for key in ("__func__", "fget", "func"))
            yield from (name, next((function for function in inner if function is not None), member))


def _function_parts(function: FunctionType) -> Iterator[object]:
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    stored = _operands(function.__code__, "STORE_GLOBAL")
    for name in sorted(_operands(function.__code__, "LOAD_GLOBAL", "LOAD_NAME") - stored):
        if name in function.__globals__:
            yield from (name, function.__globals__[name])


def _operands(code: CodeType, *operations: str) -> set[str]:
    """Return the names that these operations of `code`, and of functions inside it, work on."""
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in operations}
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return found.union(*(_operands(constant, *operations) for constant in inside))


@cache
def _state_attributes(kind: type) -> frozenset[str]:
    """Return the attributes assigned by `forward` or `__call__` of a class, directly or in methods that they use."""
    methods: dict[str, list[FunctionType]] = {}
    for base in kind.__mro__:
        if base not in (nn.Module, object):
            for name, member in vars(base).items():
                if isinstance(member, FunctionType):
                    methods.setdefault(name, []).append(member)
    assigned: set[str] = set()
    reached, to_do = set[str](), {"forward", "__call__"}
    while to_do:
        reached |= to_do
        used: set[str] = set()
        for function in (function for name in to_do for function in methods.get(name, ())):
            assigned |= _operands(function.__code__, "STORE_ATTR")
            used |= _operands(function.__code__, "LOAD_ATTR", "LOAD_METHOD")
        to_do = (used & methods.keys()) - reached
    return frozenset(assigned)


def _hook_attributes(hook: Callable[..., Any]) -> set[str]:
    function = hook
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    if isinstance(function, FunctionType):
        return _operands(function.__code__, "STORE_ATTR")
    return set()


def find_packed_weights(network: nn.Module) -> list[Tensor]:
    """Return the weights and biases that quantized layers keep in a packed form, which `parameters()` does not list.

    Example:
        >>> find_packed_weights(nn.Linear(2, 2))
        []
    """
    return [tensor for module in network.modules() for tensor in unpack_weights(module)]


def find_integer_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights that layers keep as plain integers, with a scale of which nothing is known, by name.

    They are tensors of int8, and of other small integers if their name says that they are weights.

    Example:
        >>> find_integer_weights(nn.Linear(2, 2))
        {}
    """
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if _holds_integer_weights(name, tensor)}


def _holds_integer_weights(name: str, tensor: Tensor) -> bool:
    if tensor.dtype == torch.int8:
        return tensor.ndim > 1 or "weight" in name
    return tensor.dtype in (torch.uint8, torch.int16, torch.int32) and "weight" in name


def unpack_weights(module: nn.Module) -> list[Tensor]:
    """Return the weight and the bias of a quantized layer; nothing for any other module."""
    # Recognised by name: importing torch.ao takes a second, and it is being retired.
    if not any(base.__name__ == "WeightedQuantizedModule" for base in type(module).__mro__):
        return []
    quantized: Any = module
    return [tensor for tensor in (quantized.weight(), quantized.bias()) if tensor is not None]
