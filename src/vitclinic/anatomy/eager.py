"""How a network runs: in evaluation mode, uncompiled, twice differentiable, or once more in a backward pass."""

from __future__ import annotations

import sys
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


def is_recomputing() -> bool:
    """Whether a backward pass is under way, in which checkpointed activations are computed once more."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Eval mode, and then every module's own mode again."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def double_differentiable() -> Iterator[None]:
    """Attention that has a second derivative, in eager mode.

    Fused attention has neither a double backward nor forward-mode derivatives, on any device, so the plain
    mathematical kernel must be the only one allowed; whatever timm decided when the network was built, this
    holds for each call inside the context. Compiled networks run uncompiled.
    """
    with sdpa_kernel(SDPBackend.MATH), eager():
        yield
