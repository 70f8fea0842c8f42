"""The common core of `sam` and the optimizer `SAM`: the ascent to w + eps and back, the two passes, and LookSAM.

    SAM  [chen2022 Eq. 2]:           eps = rho g / |g|
    ASAM [Kwon et al., ICML 2021]:   eps = rho T^2 g / |T g|,   T = |w| + eta, element by element

where g is the gradient at w and |.| one l2 norm over all parameters. Neither changes when g is scaled, so there is no
need to undo a loss scaler here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitclinic._core.sharded import inner_product, own_part, own_parts, total_norm

T = TypeVar("T")

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Ascent:
    """A temporary move of the weights from w to w + eps, of length `rho`.

    Attributes:
        rho: Length of the ascent.
        adaptive: Use ASAM's eps instead of SAM's.
        eta: ASAM's eta.

    Example:
        >>> w = nn.Parameter(torch.tensor([0.0, 0.0]))
        >>> with Ascent(rho=0.5).climb([w], [torch.tensor([3.0, 4.0])]):
        ...     print(w.data)
        tensor([0.3000, 0.4000])
        >>> print(w.data)
        tensor([0., 0.])
    """

    rho: float
    adaptive: bool = False
    eta: float = 0.01

    @contextmanager
    def climb(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> Iterator[bool]:
        """Move the parameters to w + eps inside the context, and restore w from a copy on the way out.

        If the gradient is zero or not finite, nothing moves. The gradients are consumed: the list is emptied, so that
        their memory is free during the second pass.

        Yields:
            True if the gradient was finite.
        """
        moved: list[Tensor] = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
        slopes = [g for g in gradients if g is not None]
        gradients.clear()
        norm = self._turn(moved, slopes)
        scale = self.rho / norm if math.isfinite(norm) and norm > 0 else 0.0
        # Of weights that are divided among processes (FSDP), each moves and restores its own parts.
        moved, slopes = own_parts(moved), own_parts(slopes)
        copies = [p.detach().clone() for p in moved] if scale else []
        try:
            if scale:
                with torch.no_grad():
                    torch._foreach_add_(moved, slopes, alpha=scale)
            del slopes
            yield math.isfinite(norm)
        finally:
            if scale:
                with torch.no_grad():
                    torch._foreach_copy_(moved, copies)

    @torch.no_grad()
    def _turn(self, weights: list[Tensor], slopes: list[Tensor]) -> float:
        """Turn the gradient in place into the direction of the ascent; return the norm to divide it by."""
        if not self.adaptive or not slopes:
            return total_norm(slopes)
        parts = own_parts(slopes)
        stretch = torch._foreach_abs(own_parts(weights))
        torch._foreach_add_(stretch, self.eta)
        torch._foreach_mul_(parts, stretch)
        norm = total_norm(slopes)
        torch._foreach_mul_(parts, stretch)
        return norm


@contextmanager
def separate_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[Gradients]:
    """Collect the gradients of the passes inside in the yielded list; afterwards `.grad` is as before."""
    before = [p.grad for p in parameters]
    found: Gradients = []
    for p in parameters:
        p.grad = None
    try:
        yield found
        found.extend(p.grad for p in parameters)
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


@contextmanager
def keep_buffers(module: nn.Module) -> Iterator[None]:
    """Restore all buffers, such as BatchNorm's running statistics, on the way out.

    This copies buffers instead of toggling a flag on every layer, so no layer can be left in the wrong mode by nesting
    or by an exception.
    """
    buffers = list(module.buffers())
    copies = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)


@contextmanager
def freeze(module: nn.Module) -> Iterator[None]:
    """Turn off gradients of all parameters inside the context, so that a backward pass only goes to the images."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class OrthogonalPart:
    """LookSAM's reused component g_v / |g_v| of SAM's gradient, and the number of steps made.

    A step whose gradient is not finite will be skipped, so it is neither counted nor learned from.
    """

    def __init__(self, every: int, alpha: float) -> None:
        self.every, self.alpha = every, alpha
        self.steps = 0
        self.direction: list[Tensor] | None = None

    def due(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Tell whether the next step needs its own ascent."""
        known = self.direction is not None and len(self.direction) == len(parameters)
        return not known or self.steps % self.every == 0

    @torch.no_grad()
    def learn(self, parameters: Sequence[nn.Parameter], first: Sequence[Tensor]) -> None:
        """Update the component from the gradients `first` at w and `.grad` at w + eps, both over all processes."""
        second = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        norm, size = total_norm(first), total_norm(second)
        if not math.isfinite(norm + size):
            return
        if norm > 0:
            along = inner_product(first, second, length=norm)
            torch._foreach_add_(own_parts(second), own_parts(first), alpha=-along / norm)
        length = total_norm(second)
        # If both gradients are parallel, the remainder is rounding error, not a direction.
        rounding = 100 * max(torch.finfo(s.dtype).eps for s in second) * size
        torch._foreach_mul_(own_parts(second), 1 / length if length > rounding else 0.0)
        self.direction, self.steps = second, self.steps + 1

    @torch.no_grad()
    def reuse(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the reused component to the gradient in `.grad`."""
        assert self.direction is not None
        pairs = [(p.grad, v) for p, v in zip(parameters, self.direction, strict=True) if p.grad is not None]
        norm = total_norm([g for g, _ in pairs])
        if not math.isfinite(norm):
            return
        parts = [(own_part(g), own_part(v)) for g, v in pairs]
        torch._foreach_add_([g for g, _ in parts], [v.to(g) for g, v in parts], alpha=self.alpha * norm)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "direction": self.direction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.direction = state["steps"], state["direction"]


@dataclass(frozen=True)
class Group(Generic[T]):
    """Images that share one ascent, as two passes: at w and at w + eps."""

    first: Callable[[], T]
    """The pass at w; returns the losses there."""
    second: Callable[[bool], object]
    """The pass at w + eps; its argument is False if the first gradient was not finite (the weights are then at w)."""


def sharpness_aware_gradients(
    groups: Sequence[Group[T]],
    parameters: Sequence[nn.Parameter],
    ascent: Ascent,
    reused: OrthogonalPart | None,
    *,
    module: nn.Module | None,
    average: Callable[[list[Tensor]], None],
) -> list[T]:
    """Add all groups' gradients at w + eps to `.grad`, and return their losses at w.

    Args:
        groups: The images; each group has its own eps.
        parameters: The parameters that climb.
        ascent: The climb from w to w + eps.
        reused: LookSAM's component, updated from both gradients; None for plain SAM.
        module: The module whose buffers, such as BatchNorm's statistics, are updated in the first passes only.
        average: Replaces tensors by their means over all processes.

    Returns:
        The results of the first passes, one per group.
    """
    losses: list[T] = []
    total: list[Tensor] = []
    for group in groups:
        with separate_gradients(parameters) as gradients:
            losses.append(group.first())
        found = _copy_gradients(parameters, gradients) if reused is not None else []
        with ascent.climb(parameters, gradients) as finite, keep_buffers(module) if module else nullcontext():
            group.second(finite)
        if total:
            torch._foreach_add_(total, found)
        total = total or found
    if reused is not None:
        average(total)
        reused.learn(parameters, total)
    return losses


def _copy_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> list[Tensor]:
    """Return a copy of the gradients, zero where there is none."""
    return [torch.zeros_like(p) if g is None else g.clone() for p, g in zip(parameters, gradients, strict=True)]


@torch.no_grad()
def average_over_processes(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace each tensor by its mean over the processes of a group; every process must call this."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        if work is not None:
            work.wait()
    torch._foreach_div_(list(tensors), dist.get_world_size(group))
