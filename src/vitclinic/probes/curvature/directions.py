"""Directions in weight space, along which to plot the loss.

A direction has one tensor per parameter. The length of a step must not depend on the scale of the weights, which a
normalization layer undoes; so each part of a random direction d is scaled to the norm of the same part of the weights
w:

    d_f <- d_f |w_f| / |d_f|    f: a filter, the weights w[f] of one output of a layer [Li et al. 2018]; or the weights
                                w[:, i, ...] from one input to all outputs, as in the code published with park2022
                                (`dim0`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import Eigenpairs, Ritz, largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.probe import DoesNotApply
from vitclinic.probes.subject import Subject

Direction = list[Tensor]
Normalisation = Literal["filter", "dim0", "none"]
OneDimensional = Literal["zero", "normalised"]

ACCURACY = 1e-5
"""Relative error of the eigenvalues; that of their vectors is about its square root."""


def random_direction(weights: Sequence[Tensor], seed: int) -> Direction:
    """Return a standard Gaussian direction, the same for a seed on any device and in any precision."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w) for w in weights]


def top_eigenvectors(
    surface: LossSurface,
    count: int,
    seed: int,
    go_on: Callable[[int, Ritz], bool] = lambda products, found: True,
) -> tuple[list[Direction], Eigenpairs]:
    """Return the Hessian's eigenvectors of the eigenvalues of largest magnitude, as directions of unit length.

    `go_on` is called after each product, once there are at least `count`; return False from it to stop early.
    """

    def continue_search(products: int, best: Ritz) -> bool:
        return products < count or go_on(products, best)

    (start,) = random_direction([surface.flat([w.detach() for w in surface.weights]).to(surface.vector_dtype)], seed)
    with surface.gradient_mode():
        hessian = Hessian(surface)
        found = largest_eigenpairs(hessian.product, start, count, tolerance=ACCURACY, go_on=continue_search)
        hessian.release()
    return [_like(surface.split(vector), surface.weights) for vector in found.vectors], found


def _like(direction: Direction, weights: Sequence[Tensor]) -> Direction:
    """Return the direction in the dtype of the weights."""
    return [part.to(weight.dtype) for part, weight in zip(direction, weights, strict=True)]


def normalize_direction(
    direction: Sequence[Tensor],
    weights: Sequence[Tensor],
    how: Normalisation = "filter",
    one_dimensional: OneDimensional = "zero",
) -> Direction:
    """Return the direction scaled to the norms of the weights, per filter (`filter`) or over dim 0 (`dim0`).

    One-dimensional parameters (biases, norm layers) are set to zero (`zero`), or count as one filter each
    (`normalised`). `none` scales the whole direction to unit length, one-dimensional parameters included. Parts of the
    direction that are zero stay zero.
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
    over: tuple[int, ...] | None = None  # the whole of a one-dimensional parameter
    if weight.ndim > 1:
        over = tuple(range(1, weight.ndim)) if how == "filter" else (0,)
    wanted = torch.linalg.vector_norm(weight, dim=over, keepdim=True, dtype=torch.float64)
    present = torch.linalg.vector_norm(direction, dim=over, keepdim=True, dtype=torch.float64)
    factor = torch.where(present > 0, wanted / present, 0.0)
    return (direction * factor).to(direction.dtype)


def digest(directions: Sequence[Direction]) -> str:
    """Return the SHA-256 of all numbers of some directions."""
    hashed = hashlib.sha256()
    for direction in directions:
        for part in direction:
            hashed.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


Read = Callable[[], Direction]
"""Reads one displacement D_t."""

_ADVICE = "train with checkpoint.keep_epochs=[0,1,2,...]"
_ROUNDING = 1e-12
"""Eigenvalues below this share are rounding errors of the Gram matrix."""


@dataclass(frozen=True)
class Principal:
    """Orthonormal directions, sorted by the share of the motion that they explain."""

    directions: list[Direction]
    shares: NDArray[np.float64]
    """Share of sum |D_t|^2 explained by each direction."""


@torch.no_grad()
def principal_directions(displacements: Sequence[Read], count: int, memory: int) -> Principal:
    """Return up to `count` principal directions of some displacements; fewer if they span fewer dimensions.

    For the Gram matrix, displacements are read in groups that fit into `memory` bytes, and the later ones again for
    each group. The sign of a direction makes the largest of its coordinates positive.
    """
    gram = _gram(displacements, memory)
    squares, u_tk = np.linalg.eigh(gram)
    squares, u_tk = squares[::-1], u_tk[:, ::-1]
    total = float(np.trace(gram))
    found = min(count, int((squares > _ROUNDING * total).sum())) if total > 0 else 0
    signs = np.sign(u_tk[np.abs(u_tk).argmax(axis=0), np.arange(len(gram))])
    coefficients = (u_tk * signs)[:, :found] / np.sqrt(squares[:found])
    shares = squares[:found] / total if found else np.zeros(0)
    return Principal(_combine(displacements, coefficients), shares)


def _combine(displacements: Sequence[Read], coefficients: NDArray[np.float64]) -> list[Direction]:
    """Return sum_t c_tk D_t for each k, summed in float64."""
    sums: list[list[Tensor]] = []
    for row, read in zip(coefficients, displacements, strict=True):
        parts = read()
        if not sums:
            sums = [[torch.zeros_like(part, dtype=torch.float64) for part in parts] for _ in row]
        for direction, coefficient in zip(sums, row, strict=True):
            for into, part in zip(direction, parts, strict=True):
                into.add_(part.double(), alpha=float(coefficient))
    return [[into.to(part.dtype) for into, part in zip(direction, parts, strict=True)] for direction in sums]


@torch.no_grad()
def coordinates(displacements: Sequence[Read], directions: Sequence[Direction]) -> NDArray[np.float64]:
    """Return the coordinates [t, k] of each displacement, projected onto the plane of the directions."""
    among = np.array([[_dot(one, other) for other in directions] for one in directions])
    rows = (read() for read in displacements)
    along = np.array([[_dot(row, direction) for direction in directions] for row in rows])
    return along @ np.linalg.pinv(among, hermitian=True)


def displacements(subject: Subject, surface: LossSurface) -> dict[float, Read]:
    """Return the displacements from the present weights of a surface to those after each kept epoch of the training."""
    past = None if subject.training is None else subject.training.past
    if past is None:
        raise DoesNotApply(f"it needs the weights of several epochs of a run: {_ADVICE}, and examine its directory.")
    if not past.weights:
        raise DoesNotApply(f"the run has not kept its checkpoints: {_ADVICE}.")
    home = {name: p.detach().clone() for name, p in surface.parameters.items()}

    def read(epoch: float) -> Direction:
        stored = past.weights[epoch]()
        return [stored[name].to(weight) - weight for name, weight in home.items()]

    return {epoch: partial(read, epoch) for epoch in past.weights}


def _gram(displacements: Sequence[Read], memory: int) -> NDArray[np.float64]:
    count = len(displacements)
    gram = np.zeros((count, count))
    at = 0
    while at < count:
        held = [displacements[at]()]
        size = sum(part.nbytes for part in held[0])
        gram[at, at] = _dot(held[0], held[0])
        for other in range(at + 1, count):
            row = displacements[other]()
            for index, kept in enumerate(held, start=at):
                gram[index, other] = gram[other, index] = _dot(kept, row)
            if len(held) == other - at and (len(held) + 1) * size <= memory:
                held.append(row)
                gram[other, other] = _dot(row, row)
        at += len(held)
    return gram


def _dot(one: Direction, other: Direction) -> float:
    return sum(float(a.double().flatten() @ b.double().flatten()) for a, b in zip(one, other, strict=True))
