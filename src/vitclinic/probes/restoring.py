"""Restoring the state of a network after a measurement, also if it fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitclinic.data.randomness import torch_seed

_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Dictionaries in which a module keeps its parts and hooks."""


@contextmanager
def preserve_state(network: nn.Module, seed: int = 0) -> Iterator[None]:
    """Put the network into eval mode with seeded random numbers, and restore its state afterwards, also on errors.

    The state is: its modules, their dtypes and devices, training flags and hooks, `requires_grad` flags, gradients, the
    values of all parameters and buffers, and the random states of torch, numpy and Python.

    Args:
        network: The network.
        seed: Seed of the random numbers inside.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> with preserve_state(network):
        ...     _ = network.double().weight.data.fill_(0)
        >>> network.weight.dtype, bool(network.weight.any()), network.training
        (torch.float32, True, True)
    """
    with ExitStack() as undo:
        undo.enter_context(_own_randomness(seed))
        _note_tables(network, undo)
        _note_state(network, undo)
        for module in network.modules():
            undo.callback(setattr, module, "training", module.training)
        network.eval()
        yield


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    word = torch_seed("probe", seed)
    with torch.random.fork_rng():
        random.seed(word)
        np.random.seed(word % 2**32)
        torch.manual_seed(word)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _note_tables(network: nn.Module, undo: ExitStack) -> None:
    """Remember parts and hooks: those added are removed again, and those removed or replaced come back."""

    def restore(table: dict[Any, Any], before: dict[Any, Any]) -> None:
        table.clear()
        table.update(before)

    for module in network.modules():
        for name in _TABLES:
            table = getattr(module, name)
            undo.callback(restore, table, dict(table))


def _note_state(network: nn.Module, undo: ExitStack) -> None:
    def restore(tensor: Tensor, values: Tensor) -> None:
        same_kind = (tensor.dtype, tensor.device, tensor.shape) == (values.dtype, values.device, values.shape)
        if not same_kind:
            tensor.data = values  # the network was converted or moved
        elif not torch.equal(tensor.data, values):  # to autograd, even writing the same values is a change
            tensor.data.copy_(values)

    def want_gradient(parameter: Tensor, before: bool) -> None:
        if parameter.requires_grad != before:  # weights made in inference mode refuse any setting, even the same
            parameter.requires_grad_(before)

    for parameter in network.parameters():
        # Set aside, not copied: gradients that a probe accumulates go into a tensor of their own.
        undo.callback(setattr, parameter, "grad", parameter.grad)
        undo.callback(want_gradient, parameter, parameter.requires_grad)
        parameter.grad = None
    # Noted last, so restored first: a gradient must have the dtype of its parameter.
    for tensor in (*network.parameters(), *network.buffers()):
        undo.callback(restore, tensor, tensor.detach().clone())
