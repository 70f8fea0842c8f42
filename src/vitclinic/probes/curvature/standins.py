"""What stands in for parts of a network while its tangent kernel is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitclinic.errors import ModelError

_BatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


class _ReLU(TorchFunctionMode):
    """torch's GELU, called as a function or by a module, is ReLU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is F.gelu:
            return F.relu(args[0] if args else kwargs["input"])
        return function(*args, **(kwargs or {}))


@contextmanager
def relu_for_gelu(network: nn.Module) -> Iterator[None]:
    """ReLU in the place of every GELU [chen2022 App. G]: of torch's, and of modules that are named as one.

    The names are for the approximations that some libraries write out, such as QuickGELU.
    """
    with ExitStack() as undo:
        for parent in network.modules():
            for name, child in parent.named_children():
                if "gelu" in type(child).__name__.lower() and not _has_parts(child):
                    undo.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = nn.ReLU()
        undo.enter_context(_ReLU())
        yield


@contextmanager
def drawn_head(network: nn.Module, classes: int, deviation: float, seed: int) -> Iterator[None]:
    """A classifier of normal weights and no bias in the place of the network's own, which may start at zero."""
    found = [module for module in network.modules() if isinstance(module, nn.Linear) and module.out_features == classes]
    if not found:
        raise ModelError(f"the network has no linear layer with {classes} outputs, whose weights `head` could draw.")
    head = found[-1]
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) * deviation
    values = [(head.weight, drawn)] + ([] if head.bias is None else [(head.bias, torch.zeros(classes))])
    own = [parameter.detach().clone() for parameter, _ in values]
    try:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), value in zip(values, own, strict=True):
                parameter.copy_(value)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in (*module.children(), *module.parameters()))


@contextmanager
def measured_statistics(network: nn.Module, batches: Iterable[Tensor]) -> Iterator[None]:
    """BatchNorm with the mean and the variance of these images: those of each batch, averaged; then fixed.

    Batches should be of one size. A network without BatchNorm does not see them.
    """
    norms = batch_norms(network)
    if not norms:
        yield
        return
    with ExitStack() as undo:
        for norm in norms:
            _give_own_statistics(norm, undo)
        with torch.no_grad():
            for images in batches:
                network(images)
        for norm in norms:
            norm.eval()
        yield


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _give_own_statistics(norm: _BatchNorm, undo: ExitStack) -> None:
    """New running statistics, which follow the average over all batches to come."""
    for name in ("training", "momentum", "track_running_stats"):
        undo.callback(setattr, norm, name, getattr(norm, name))
    like = next((t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.empty(0))
    zeros = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
    count = torch.zeros((), dtype=torch.long, device=like.device)
    for name, value in zip(_STATISTICS, (zeros, zeros + 1, count), strict=True):
        undo.callback(norm._buffers.__setitem__, name, norm._buffers.get(name))
        norm._buffers[name] = value
    norm.momentum = None
    norm.track_running_stats = True
    norm.train()
