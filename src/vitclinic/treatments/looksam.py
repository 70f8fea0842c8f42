"""LookSAM: the ascent only every k steps [Liu et al., CVPR 2022, Algorithm 1].

What SAM's gradient g_s adds to the gradient g at w, at right angles to it, changes slowly from step to step:

    every k-th step:   g_v = g_s - (g_s . g / |g|) g / |g|          (and the step is SAM's own, with g_s)
    in between:        g_s = g + alpha (|g| / |g_v|) g_v            (one pass)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from vitclinic.treatments.ascent import Gradients


class OrthogonalPart:
    """The reused part g_v / |g_v| of SAM's gradient, and how many steps were made.

    A step whose gradient is not finite is not counted and teaches nothing: it is going to be skipped.
    """

    def __init__(self, every: int, alpha: float) -> None:
        self.every, self.alpha = every, alpha
        self.steps = 0
        self.direction: list[Tensor] | None = None

    def due(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the next step is to have an ascent of its own."""
        known = self.direction is not None and len(self.direction) == len(parameters)
        return not known or self.steps % self.every == 0

    @torch.no_grad()
    def learn(self, parameters: Sequence[nn.Parameter], first: Sequence[Tensor]) -> None:
        """From the gradient `first` at w and the one at w + eps in `.grad`, both of all processes."""
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


def filled(parameters: Sequence[nn.Parameter], gradients: Gradients) -> list[Tensor]:
    """A copy of the gradients, zero where there is none."""
    return [torch.zeros_like(p) if g is None else g.clone() for p, g in zip(parameters, gradients, strict=True)]


@torch.no_grad()
def average_over_processes(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace each tensor by its mean over the processes of a group, all of which call this."""
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        if work is not None:
            work.wait()
    torch._foreach_div_(list(tensors), dist.get_world_size(group))
