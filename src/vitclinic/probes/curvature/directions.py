"""Directions in the space of weights, along which to look at the loss.

A direction is one tensor a parameter. How far a step of 1 is must not depend on the scale of the weights, which a norm
behind them undoes; so a random direction d is given the norms of the weights w, part by part:

    d_f <- d_f |w_f| / |d_f|    f: the tensor of one output of a layer, w[f] [Li et al. 2018]; or what one input sends
                                to all outputs, w[:, i, ...], as in the published code of park2022 (`dim0`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import Eigenpairs, Ritz, largest_eigenpairs
from vitclinic.probes.curvature.surface import LossSurface

Direction = list[Tensor]
Normalisation = Literal["filter", "dim0", "none"]
OneDimensional = Literal["zero", "normalised"]

ACCURACY = 1e-5
"""Relative, of the eigenvalues; that of their vectors is about its square root."""


def random_direction(weights: Sequence[Tensor], seed: int) -> Direction:
    """Standard Gaussian numbers, the same for a seed on any device and in any precision."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w) for w in weights]


def top_eigenvectors(
    surface: LossSurface,
    count: int,
    seed: int,
    go_on: Callable[[int, Ritz], bool] = lambda products, found: True,
) -> tuple[list[Direction], Eigenpairs]:
    """The Hessian's eigenvectors whose eigenvalues are largest in magnitude, as directions of unit length.

    `go_on` is asked after each product, once there are as many as vectors.
    """

    def continued(products: int, best: Ritz) -> bool:
        return products < count or go_on(products, best)

    (start,) = random_direction([surface.flat([w.detach() for w in surface.weights]).to(surface.vector_dtype)], seed)
    with surface.measured():
        hessian = Hessian(surface)
        found = largest_eigenpairs(hessian.product, start, count, tolerance=ACCURACY, go_on=continued)
        hessian.release()
    return [_like(surface.split(vector), surface.weights) for vector in found.vectors], found


def _like(direction: Direction, weights: Sequence[Tensor]) -> Direction:
    """In the weights' own precision."""
    return [part.to(weight.dtype) for part, weight in zip(direction, weights, strict=True)]


def normalised(
    direction: Sequence[Tensor],
    weights: Sequence[Tensor],
    how: Normalisation = "filter",
    one_dimensional: OneDimensional = "zero",
) -> Direction:
    """The direction with the norms of the weights, per output (`filter`) or over dim 0 (`dim0`).

    Parameters of one dimension (biases, norms) do not move (`zero`), or count as one part each (`normalised`).
    `none` makes the whole direction one of unit length, in which one-dimensional parameters keep their share.
    A part of the direction that is zero stays so.
    """
    if how == "none":
        norms = [torch.linalg.vector_norm(d, dtype=torch.float64) for d in direction]
        length = float(torch.stack([norm.cpu() for norm in norms]).norm())
        return [d / length if length else d.clone() for d in direction]
    pairs = zip(direction, (w.detach() for w in weights), strict=True)
    if one_dimensional == "zero":
        return [torch.zeros_like(d) if w.ndim < 2 else _with_norms(d, w, how) for d, w in pairs]
    return [_with_norms(d, w, how) for d, w in pairs]


def _with_norms(direction: Tensor, weight: Tensor, how: Normalisation) -> Tensor:
    over: tuple[int, ...] | None = None  # all of a one-dimensional parameter
    if weight.ndim > 1:
        over = tuple(range(1, weight.ndim)) if how == "filter" else (0,)
    wanted = torch.linalg.vector_norm(weight, dim=over, keepdim=True, dtype=torch.float64)
    present = torch.linalg.vector_norm(direction, dim=over, keepdim=True, dtype=torch.float64)
    factor = torch.where(present > 0, wanted / present, 0.0)
    return (direction * factor).to(direction.dtype)


def digest(directions: Sequence[Direction]) -> str:
    """SHA-256 of their numbers."""
    hashed = hashlib.sha256()
    for direction in directions:
        for part in direction:
            hashed.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
