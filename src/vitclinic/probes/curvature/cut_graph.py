"""Weights that a network computes with and that have no gradient: behind `no_grad`, or a function of the user's own.

To autograd they are weights that nothing depends on, so that every curvature would be that of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from vitclinic.probes.probe import DoesNotApply

_NUDGE = 0.1


def find_cut_weights(compute: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of weights without a gradient, if moving them changes a value all the same.

    Args:
        compute: Function that returns the value at the present weights.
        parameters: Weights that require a gradient, by name.

    Returns:
        The names; none if the value has no gradient at all, which its readers say themselves.
    """
    with torch.enable_grad():
        value = compute()
    if not value.requires_grad:
        return []
    gradients = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    cut = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    return cut if cut and _is_moved(compute, value, [parameters[name].data for name in cut]) else []


@torch.no_grad()
def _is_moved(compute: Callable[[], Tensor], value: Tensor, weights: list[Tensor]) -> bool:
    """Return True if a value changes with weights, which are restored."""
    kept = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    try:
        for weight in weights:
            weight.add_(_NUDGE * torch.randn(weight.shape, generator=generator).to(weight))
        return not torch.equal(compute(), value)
    finally:
        torch._foreach_copy_(weights, kept)


def refuse_cut_weights(names: list[str]) -> None:
    """Raise DoesNotApply if there are such weights."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise DoesNotApply(
            f"the network computes with {names[0]}{more} without gradients (no_grad, detach, or a function without a"
            " derivative), so that its curvature would be that of the other weights alone. Let gradients pass, or"
            " measure the part that has them."
        )
