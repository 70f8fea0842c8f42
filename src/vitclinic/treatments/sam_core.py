"""What `sam` and the optimizer `SAM` share: the ascent from w to w + eps and back, the two passes, and LookSAM.

    SAM  [chen2022 Eq. 2]:           eps = rho g / |g|
    ASAM [Kwon et al., ICML 2021]:   eps = rho T^2 g / |T g|,   T = |w| + eta, element by element

with g the gradient at w and |.| one l2 norm over all parameters. Both do not change when g is scaled, so that a loss
scaler needs no unscaling here.
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
from torch.nn.utils import get_total_norm

T = TypeVar("T")

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Ascent:
    """A climb of length `rho`.

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
        """Have the parameters at w + eps; afterwards, whatever happened, at w, from a copy.

        Yields whether the gradient was finite: if not, and if it is zero, nothing moves. The gradients are used up,
        and the list is emptied so that their memory is free during the second pass.
        """
        moved: list[Tensor] = [p for p, g in zip(parameters, gradients, strict=True) if g is not None]
        slopes = [g for g in gradients if g is not None]
        gradients.clear()
        norm = self._turn(moved, slopes)
        scale = self.rho / norm if math.isfinite(norm) and norm > 0 else 0.0
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
        """Turn the gradient, in place, into the direction to climb in; returns what makes it a step of length 1."""
        if not self.adaptive or not slopes:
            return float(get_total_norm(slopes))
        stretch = torch._foreach_abs(weights)
        torch._foreach_add_(stretch, self.eta)
        torch._foreach_mul_(slopes, stretch)
        norm = float(get_total_norm(slopes))
        torch._foreach_mul_(slopes, stretch)
        return norm


@contextmanager
def separate_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[Gradients]:
    """Put the gradients of the passes inside into the list that is yielded; `.grad` is afterwards as before."""
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
    """Let no buffer move: BatchNorm's running statistics and count, or any other, are afterwards as before.

    A copy put back, rather than a switch set on every layer: there is nothing to leave in a wrong position by entering
    twice or leaving by an exception.
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
    """Let no parameter ask for a gradient: a backward pass then costs only the way down to the images."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class OrthogonalPart:
    """The reused part g_v / |g_v| of SAM's gradient, and how many steps were made.

    A step whose gradient is not finite is not counted and teaches nothing: it is going to be skipped.
    """

    def __init__(self, every: int, alpha: float) -> None:
        self.every, self.alpha = every, alpha
        self.steps = 0
        self.direction: list[Tensor] | None = None

    def due(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Tell whether the next step is to have an ascent of its own."""
        known = self.direction is not None and len(self.direction) == len(parameters)
        return not known or self.steps % self.every == 0

    @torch.no_grad()
    def learn(self, parameters: Sequence[nn.Parameter], first: Sequence[Tensor]) -> None:
        """Learn from the gradient `first` at w and the one at w + eps in `.grad`, both of all processes."""
        second = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        norm, size = float(get_total_norm(first)), float(get_total_norm(second))
        if not math.isfinite(norm + size):
            return
        if norm > 0:
            along = sum(float((g / norm * s).sum()) for g, s in zip(first, second, strict=True))
            torch._foreach_add_(second, list(first), alpha=-along / norm)
        length = float(get_total_norm(second))
        # Where both gradients point the same way, what is left over is rounding, not a direction.
        rounding = 100 * max(torch.finfo(s.dtype).eps for s in second) * size
        torch._foreach_mul_(second, 1 / length if length > rounding else 0.0)
        self.direction, self.steps = second, self.steps + 1

    @torch.no_grad()
    def reuse(self, parameters: Sequence[nn.Parameter]) -> None:
        """Turn the gradient in `.grad` into LookSAM's."""
        assert self.direction is not None
        pairs = [(p.grad, v) for p, v in zip(parameters, self.direction, strict=True) if p.grad is not None]
        norm = float(get_total_norm([g for g, _ in pairs]))
        if not math.isfinite(norm):
            return
        torch._foreach_add_([g for g, _ in pairs], [v.to(g) for g, v in pairs], alpha=self.alpha * norm)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "direction": self.direction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.direction = state["steps"], state["direction"]


@dataclass(frozen=True)
class Group(Generic[T]):
    """Images that have one ascent: what to do with them at w, and at w + eps."""

    first: Callable[[], T]
    """Differentiate at w; returns the losses there."""
    second: Callable[[bool], object]
    """Differentiate at w + eps; told whether the first gradient was finite (if not, the weights are still at w)."""


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
        groups: Each has an eps of its own.
        parameters: Those that climb.
        ascent: How they climb.
        reused: Where LookSAM keeps what it learns from both gradients.
        module: Its buffers, such as BatchNorm's statistics, move in the first passes only.
        average: Replaces tensors by their means over all processes.
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
    """Replace each tensor by its mean over the processes of a group, all of which call this."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        if work is not None:
            work.wait()
    torch._foreach_div_(list(tensors), dist.get_world_size(group))
