"""Checks of arguments: a wrong shape is a ValueError that says what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def check_shape(x: Tensor, axes: str, what: str) -> None:
    """Raise ValueError unless `x` is a floating-point tensor with as many axes as `axes` names, such as "B N D"."""
    names = axes.split()
    if not isinstance(x, Tensor) or x.ndim != len(names):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{what} must be a tensor [{', '.join(names)}] (got {got}).")
    if not x.is_floating_point():
        raise ValueError(f"{what} must hold floating-point numbers (got {x.dtype}).")


def check_labels(labels: Tensor, count: int, what: str) -> None:
    """Raise ValueError unless `labels` are `count` integers."""
    if labels.ndim != 1 or len(labels) != count or labels.is_floating_point():
        raise ValueError(f"{what} must be {count} class indices [B] (got {labels.dtype}, {tuple(labels.shape)}).")


def check_same(first: Tensor, second: Tensor, what: str) -> None:
    """Raise ValueError unless both tensors have the same shape."""
    if first.shape != second.shape:
        raise ValueError(f"{what} must have the same shape (got {tuple(first.shape)} and {tuple(second.shape)}).")


def check_attention(attention: Tensor) -> None:
    """Raise ValueError unless `attention` is [B, H, Q, K]."""
    check_shape(attention, "B H Q K", "attention weights")


def check_grid(tokens: int, grid: tuple[int, int], prefix: int, what: str = "attention") -> None:
    """Raise ValueError unless prefix tokens and grid add up to the number of tokens."""
    if tokens != prefix + grid[0] * grid[1]:
        raise ValueError(
            f"{what} has {tokens} tokens, and {prefix} prefix tokens with a grid of {grid[0]} x {grid[1]} are"
            f" {prefix + grid[0] * grid[1]}: give the `grid` of the patches and the number of `prefix` tokens."
        )


def list_parameters(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters as a list; raise ValueError unless all of them are leaves that require a gradient."""
    found = [params] if isinstance(params, Tensor) else list(params)
    if not found:
        raise ValueError("There are no parameters; give `model.parameters()` or a list of tensors.")
    for p in found:
        if not (isinstance(p, Tensor) and p.is_leaf and p.requires_grad):
            raise ValueError(
                "Each parameter must be a leaf tensor with requires_grad=True; leave frozen parameters out of `params`."
            )
    return found


def widen(x: Tensor) -> Tensor:
    """Convert half precision to float32; keep float32 and float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_parts(parts: Sequence[Tensor], like: Sequence[Tensor], what: str) -> None:
    """Raise ValueError unless there is one tensor of the same shape for each of `like`."""
    if [p.shape for p in parts] != [p.shape for p in like]:
        raise ValueError(f"{what} must have one tensor of the same shape for each parameter.")
