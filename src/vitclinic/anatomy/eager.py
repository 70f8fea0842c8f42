"""Contexts in which a network runs: in eval mode, uncompiled, twice differentiable; and a check for recomputation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def eager() -> AbstractContextManager[None]:
    """Run compiled modules as plain Python: a graph compiled earlier does not see hooks added later."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second or two
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


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
