"""Formulas of the loss around the weights: flatness, directions, landscape, SAM; of the kernel and the trajectory.

`loss` and `params` are as in `vitclinic.functional.curvature`. The parameters are moved in place and put back bit for
bit. Gradients and what is made of them (by SAM, ASAM and LookSAM) are lists with one tensor a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitclinic.functional.checks import check_parts, check_shape
from vitclinic.functional.curvature import Estimate, Loss, Surface
from vitclinic.probes.curvature import directions, landscape, tangent_kernel, trajectory
from vitclinic.probes.curvature.flatness import sample_losses
from vitclinic.treatments.sam_core import Ascent, OrthogonalPart


def average_flatness(
    loss: Loss, params: Iterable[Tensor], sigma: float = 0.01, draws: int = 100, *, seed: int = 0
) -> Estimate:
    """Estimate the average flatness L^N: the mean loss of weights with added Gaussian noise.

        L^N = E[L(w + e)],   e ~ N(0, sigma^2 I);   to second order L(w) + sigma^2 / 2 trace(H)

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters that get noise.
        sigma: Standard deviation of the noise; only values of one sigma can be compared.
        draws: How many (the paper: 1000).
        seed: Of the noise.

    Returns:
        The mean, its standard error, and the loss of each draw in float64.

    References:
        chen2022 Table 1.

    Example:
        >>> w = torch.zeros(1000, requires_grad=True)
        >>> found = average_flatness(lambda: (w**2).sum(), [w], sigma=0.1, draws=20)
        >>> round(found.mean)  # 0.1^2 / 2 * trace(2 I)
        10
    """
    if not sigma > 0 or draws < 1:
        raise ValueError(f"sigma must be above 0 and draws at least 1 (got {sigma} and {draws}).")
    surface = Surface(loss, params)
    with torch.no_grad():
        return Estimate.of(torch.from_numpy(sample_losses(surface, sigma, draws, seed=seed)))


def random_direction(params: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """Draw standard Gaussian numbers, one tensor per parameter, the same for a seed on any device.

    Args:
        params: The parameters.
        seed: Of the random numbers.

    Example:
        >>> [part.shape for part in random_direction(torch.nn.Linear(3, 2).parameters())]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    return directions.random_direction(list(params), seed)


def filter_normalize(
    direction: Sequence[Tensor],
    params: Iterable[Tensor],
    over: Literal["filter", "dim0"] = "filter",
    *,
    vectors: Literal["zero", "normalize"] = "zero",
) -> list[Tensor]:
    """Rescale a direction to the norms of the weights, filter by filter.

        d_f <- d_f |w_f| / |d_f|

    Args:
        direction: One tensor a parameter.
        params: The parameters, whose norms it gets.
        over: "filter": f is one output of a layer, w[f] [Li et al. 2018]; "dim0": what one input sends to all
            outputs, w[:, i], as in the published code of park2022.
        vectors: Parameters of one dimension (biases, norms) do not move ("zero"), or count as one part each.

    Returns:
        One tensor a parameter; parts of the direction that are zero stay so.

    References:
        Li et al., NeurIPS 2018; park2022 Fig. 1a; chen2022 Fig. 1.

    Example:
        >>> filter_normalize([torch.tensor([[3.0, 4.0], [0.0, 1.0]])], [torch.tensor([[10.0, 0.0], [0.0, 2.0]])])
        [tensor([[6., 8.],
                [0., 2.]])]
    """
    weights = list(params)
    check_parts(direction, weights, "direction")
    if over not in ("filter", "dim0"):
        raise ValueError(f"over must be 'filter' or 'dim0' (got {over!r}).")
    return directions.normalize_direction(direction, weights, over, "zero" if vectors == "zero" else "normalised")


def loss_landscape(
    loss: Loss, params: Iterable[Tensor], along: Sequence[Sequence[Tensor]], points: int = 21, span: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Evaluate the loss on a line or plane through the weights.

        L(w + x d_1 + y d_2),   x and y from -span to span

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters that move.
        along: One or two directions, each one tensor a parameter; see `filter_normalize`.
        points: On each axis, at least 3; w itself is one of them if their number is odd.
        span: The end of each axis.

    Returns:
        The axis [points] and the losses [points] or [points, points], in float64.

    References:
        Li et al., NeurIPS 2018; park2022 Fig. 1a; chen2022 Fig. 1.

    Example:
        >>> w = torch.zeros(1, requires_grad=True)
        >>> loss_landscape(lambda: (w**2).sum(), [w], [[torch.ones(1)]], points=3)
        (tensor([-1.,  0.,  1.], dtype=torch.float64), tensor([1., 0., 1.], dtype=torch.float64))
    """
    surface = Surface(loss, params)
    if len(along) not in (1, 2) or points < 3:
        raise ValueError(f"Give one or two directions and at least 3 points (got {len(along)} and {points}).")
    for direction in along:
        check_parts(direction, surface.weights, "each direction")
    grid = landscape.Grid(points, span, len(along))
    with torch.no_grad():
        grid.fill(surface, [list(direction) for direction in along])
    return torch.from_numpy(grid.axis), torch.from_numpy(grid.losses)


def ntk(model: nn.Module, images: Tensor) -> Tensor:
    """Return the neural tangent kernel of a batch of images, with the logits of each image summed.

        Theta = J J^T,   J_i the gradient of sum_k f_k(x_i) in all parameters

    Args:
        model: A network that treats every image by itself: BatchNorm in evaluation mode. The paper replaces GELU by
            ReLU before (`vitclinic.treatments.gelu_to_relu`).
        images: [m, ...].

    Returns:
        [m, m] in float64.

    References:
        chen2022 App. G; Jacot et al., NeurIPS 2018.

    Example:
        >>> ntk(torch.nn.Linear(3, 2), torch.eye(3))  # for each of two outputs x_i . x_j, and 1 for its bias
        tensor([[4., 2., 2.],
                [2., 4., 2.],
                [2., 2., 4.]], dtype=torch.float64)
    """
    return tangent_kernel.TangentKernel(model)(images)


def condition_number(kernel: Tensor, precision: torch.dtype = torch.float64) -> float:
    """Return the condition number kappa = lambda_1 / lambda_m of a symmetric positive kernel such as the NTK.

    Args:
        kernel: [m, m].
        precision: What the network computes in: eigenvalues below its rounding are not told from zero, and count as
            that rounding. The result is then a lower bound.

    References:
        chen2022 App. G.

    Example:
        >>> condition_number(torch.diag(torch.tensor([8.0, 4.0, 2.0])))
        4.0
    """
    check_shape(kernel, "m m", "the kernel")
    if len(kernel) < 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(f"the kernel must be square, with at least two images (got {tuple(kernel.shape)}).")
    return tangent_kernel.conditioning(kernel.detach().double(), torch.finfo(precision).eps).kappa


class Polar(NamedTuple):
    """A trajectory in polar coordinates."""

    radius: Tensor
    """r_t = |D_t| / |D_0|, [T - 1] in float64."""
    angle: Tensor
    """theta_t between D_t and D_0 in radians, [T - 1] in float64; NaN where D_t is zero."""


def polar_coordinates(weights: Sequence[Tensor | Sequence[Tensor]]) -> Polar:
    """Return the training trajectory in polar coordinates around the final weights.

        D_t = w_t - w_final,   r_t = |D_t| / |D_0|,   theta_t = arccos(D_t . D_0 / (|D_t| |D_0|))

    Args:
        weights: w_0, ..., w_final, at least two: each a tensor, or one tensor a parameter. A tensor [T, n] will do.

    Returns:
        Radius and angle of all but the final weights, for which they are 0 / 0.

    References:
        park2022 Fig. 1b.

    Example:
        >>> radius, angle = polar_coordinates(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> radius.tolist(), torch.rad2deg(angle).tolist()
        ([1.0, 0.5], [0.0, 90.0])
    """
    if len(weights) < 2:
        raise ValueError(f"A trajectory needs at least two sets of weights (got {len(weights)}).")
    states = [[w] if isinstance(w, Tensor) else list(w) for w in weights]
    for state in states:
        check_parts(state, states[-1], "the weights of each step")
    named = [{str(place): part for place, part in enumerate(state)} for state in states]
    found = trajectory.polar_coordinates(named[0], named[-1], named[:-1])
    return Polar(torch.from_numpy(found.radius), torch.from_numpy(found.angle))


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
