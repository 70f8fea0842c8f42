"""Formulas of sharpness-aware minimization: the ascent of SAM and ASAM, and what LookSAM reuses.

Gradients and what is made of them are lists with one tensor a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vitclinic.functional.checks import check_parts
from vitclinic.treatments.sam_core import Ascent, OrthogonalPart


@torch.no_grad()
def sam_perturbation(
    params: Iterable[Tensor],
    rho: float = 0.1,
    adaptive: bool = False,
    *,
    eta: float = 0.01,
    gradients: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return SAM's ascent eps, one tensor per parameter, with a single norm over all of them.

        SAM    eps = rho g / |g|_2
        ASAM   eps = rho T^2 g / |T g|_2,   T = |w| + eta

    Args:
        params: The parameters w, after a backward pass unless `gradients` are given; one without a gradient gets 0.
        rho: Length of the ascent.
        adaptive: ASAM's, measured relative to each weight's size.
        eta: What ASAM adds to a weight's size.
        gradients: g, one tensor a parameter, instead of `.grad`.

    Returns:
        eps; 0 where the gradient is 0 or not finite.

    References:
        chen2022 Eq. 2; Foret et al., ICLR 2021; Kwon et al., ICML 2021 (ASAM).

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> (w * torch.tensor([3.0, 4.0])).sum().backward()
        >>> sam_perturbation([w], rho=0.5)
        [tensor([0.3000, 0.4000])]
    """
    weights = list(params)
    given = [p.grad for p in weights] if gradients is None else list(gradients)
    slopes = [torch.zeros_like(p) if g is None else g.clone() for p, g in zip(weights, given, strict=True)]
    check_parts(slopes, weights, "gradients")
    if not rho >= 0 or not eta >= 0:
        raise ValueError(f"rho and eta must not be negative (got {rho} and {eta}).")
    norm = Ascent(rho, adaptive, eta)._turn([p.detach() for p in weights], slopes)
    scale = rho / norm if math.isfinite(norm) and norm > 0 else 0.0
    return [slope * scale if scale else torch.zeros_like(slope) for slope in slopes]


def looksam_direction(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Return the component of SAM's gradient orthogonal to the plain one, as a unit vector, which LookSAM reuses.

        v = (g_s - (g_s . u) u) / |g_s - (g_s . u) u|,   u = g / |g|

    Args:
        first: g, the gradient at w, one tensor a parameter.
        second: g_s, the gradient at w + eps.

    Returns:
        One tensor a parameter; 0 where both gradients point the same way.

    Raises:
        ValueError: If a gradient is not finite.

    References:
        Liu et al., CVPR 2022 (LookSAM).

    Example:
        >>> looksam_direction([torch.tensor([2.0, 0.0])], [torch.tensor([3.0, 5.0])])
        [tensor([0., 1.])]
    """
    check_parts(second, first, "the second gradient")
    part = OrthogonalPart(every=2, alpha=1.0)
    part.learn(_with_gradients(second), first)
    if part.direction is None:
        raise ValueError("A gradient is not finite.")
    return part.direction


def looksam_gradient(gradient: Sequence[Tensor], direction: Sequence[Tensor], alpha: float = 0.7) -> list[Tensor]:
    """Return LookSAM's gradient for a step between two ascents: g + alpha |g| v.

    Args:
        gradient: g at w, one tensor a parameter.
        direction: v of `looksam_direction`, from an earlier step.
        alpha: Weight of the reused part.

    References:
        Liu et al., CVPR 2022 (LookSAM).

    Example:
        >>> looksam_gradient([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 1.0])], alpha=0.2)
        [tensor([3., 5.])]
    """
    check_parts(direction, gradient, "the direction")
    part = OrthogonalPart(every=2, alpha=alpha)
    part.direction = list(direction)
    carriers = _with_gradients(gradient)
    part.reuse(carriers)
    return [p.grad for p in carriers if p.grad is not None]


def _with_gradients(gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return parameters with (copies of) these tensors as `.grad`."""
    carriers = [nn.Parameter(torch.empty_like(g)) for g in gradients]
    for carrier, gradient in zip(carriers, gradients, strict=True):
        carrier.grad = gradient.detach().clone()
    return carriers
