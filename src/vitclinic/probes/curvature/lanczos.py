"""Lanczos: eigenvalues, and quadrature rules, of a symmetric matrix that is known by its products with vectors.

After m products, A V = V T + beta v_{m+1} e_m^T with orthonormal rows of V and T = V A V^T. The eigenvalues theta of T
approximate those of A; their residual is |A y - theta y| = beta |s_m|, s the eigenvector of T. An eigenvalue of A lies
within the residual r of theta, and within r^2 / gap of it where the rest of the spectrum is `gap` away.

That says how good a value is, not whether it is one of the largest: of two that are close, or where the start has
little of one, the other comes out first, as if it were alone. So no other value may lie within `_NEAR` of its own
residuals of those asked for: the one that is missing shows as a value that is still on its way, with a large residual.
(Once the basis is full, that is given up: few vectors never tell the values of a dense spectrum from each other.)
Of the five largest of two trained ViTs, from 1,000 random starts each, 23% were wrong without that, and none with it,
for 26 and 23 products instead of 23 and 18 (benchmarks/missed_eigenvalues.py).

New vectors are made orthogonal to all earlier ones, twice: without that, rounding makes copies of converged
eigenvalues [Parlett 1998, ch. 13]. When the basis is full it restarts from its best vectors [Wu & Simon 2000].
Shapes: n the matrix's order, m the size of the basis, k wanted eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BASIS = 40
"""Vectors kept, as a rule: restarts are then rare, and memory is that of so many copies of the weights."""

_NEAR = 4
"""Residuals that a value which is not wanted has to stay below those that are, by magnitude."""

Product = Callable[[Tensor], Tensor]
"""A symmetric matrix times a vector [n]."""


@dataclass(frozen=True)
class Ritz:
    """The best approximations of the wanted eigenvalues so far, in descending magnitude."""

    values: NDArray[np.float64]
    residuals: NDArray[np.float64]
    errors: NDArray[np.float64]
    coefficients: NDArray[np.float64]
    """Of their vectors in the basis, [m, k]."""
    converged: bool


@dataclass(frozen=True)
class Eigenpairs:
    """The eigenvalues of largest magnitude, in descending magnitude, with their sign."""

    values: NDArray[np.float64]
    residuals: NDArray[np.float64]
    """|A y - value y| for the unit vector y that belongs to each value."""
    errors: NDArray[np.float64]
    """An estimate of each value's distance to an eigenvalue: the smaller of residual and residual^2 / gap."""
    vectors: Tensor
    """The unit vectors y, [k, n]."""
    products: int
    converged: bool


class Basis:
    """An orthonormal Krylov basis, and the matrix projected onto it; grows by one vector a product."""

    def __init__(self, product: Product, start: Tensor, size: int) -> None:
        self.product = product
        self.vectors = start.new_empty((size + 1, len(start)))
        self.vectors[0] = start / start.norm()
        self.projected = np.zeros((size + 1, size + 1))
        self.size = 0
        self.beta = 0.0
        self.products = 0
        self.largest = 0.0
        self.restarted = False

    def grow(self) -> None:
        """One product: the newest vector's image joins the basis."""
        m = self.size
        image = self.product(self.vectors[m])
        self.products += 1
        if not bool(image.isfinite().all()):
            raise ValueError("a product with the matrix is not finite")
        known = self.vectors[: m + 1]
        along = known @ image
        image = image - along @ known
        again = known @ image
        image = image - again @ known
        along += again
        self.projected[: m + 1, m] = self.projected[m, : m + 1] = along.double().cpu().numpy()
        self.beta = float(image.norm())
        self.largest = max(self.largest, float(along.norm()), self.beta)
        self.size = m + 1
        self.projected[m + 1, m] = self.projected[m, m + 1] = self.beta
        if self.size < len(image):
            self.vectors[m + 1] = image / self.beta if not self.is_invariant else self._fresh()

    @property
    def is_invariant(self) -> bool:
        """Whether the matrix maps the basis into itself, to rounding: its eigenvalues are then exact."""
        return self.beta <= 10 * torch.finfo(self.vectors.dtype).eps * self.largest

    def _fresh(self) -> Tensor:
        """A random direction outside a closed basis, to find what it cannot see; it is not coupled to the rest."""
        m = self.size
        self.beta = self.projected[m, m - 1] = self.projected[m - 1, m] = 0.0
        fresh: Tensor = torch.randn(self.vectors.shape[1], generator=torch.Generator().manual_seed(m)).to(self.vectors)
        for _ in range(2):
            fresh = fresh - (self.vectors[:m] @ fresh) @ self.vectors[:m]
        unit: Tensor = fresh / fresh.norm()
        return unit

    def restart(self, keep: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Keep the Ritz vectors whose coefficients are the columns of `keep`, and the newest vector."""
        m, p = self.size, keep.shape[1]
        coefficients = torch.from_numpy(keep.T.copy()).to(self.vectors)
        newest = self.vectors[m].clone()
        self.vectors[:p] = coefficients @ self.vectors[:m]
        self.vectors[p] = newest
        self.projected[:] = 0
        self.projected[range(p), range(p)] = values
        self.projected[p, :p] = self.projected[:p, p] = self.beta * keep[m - 1]
        self.size, self.restarted = p, True


def largest_eigenpairs(
    product: Product,
    start: Tensor,
    k: int,
    *,
    tolerance: float = 1e-3,
    max_products: int = 300,
    basis: int | None = None,
    go_on: Callable[[int, Ritz], bool] = lambda products, found: True,
) -> Eigenpairs:
    """The `k` eigenvalues of largest magnitude of the symmetric matrix behind `product`, from the vector `start`.

    Stops when the estimated error of each is below `tolerance` times its magnitude and no other value comes near, after
    `max_products`, or when `go_on`, called after every product with the best so far, says no; `converged` says which.
    `basis` bounds the number of vectors kept.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, -5.0, 1.0, 0.5], dtype=torch.float64))
        >>> found = largest_eigenpairs(lambda v: matrix @ v, torch.ones(4, dtype=torch.float64), 2)
        >>> found.values.round(6).tolist()
        [-5.0, 3.0]
    """
    n = len(start)
    k = min(k, n)
    size = min(n, max_products, max(_BASIS if basis is None else basis, 2 * k + 2))
    space = Basis(product, start, size)
    while True:
        space.grow()
        found = _ritz(space, k, tolerance)
        if found.converged or space.products >= max_products or not go_on(space.products, found):
            break
        if space.size == size:
            kept = _ritz(space, k + (size - k) // 2, tolerance)
            space.restart(kept.coefficients, kept.values)
    coefficients = torch.from_numpy(found.coefficients.T.copy()).to(space.vectors)
    vectors = coefficients @ space.vectors[: space.size]
    return Eigenpairs(found.values, found.residuals, found.errors, vectors, space.products, found.converged)


def _ritz(space: Basis, k: int, tolerance: float) -> Ritz:
    m, n = space.size, space.vectors.shape[1]
    values, s_mm = np.linalg.eigh(space.projected[:m, :m])
    residuals = np.abs(space.beta * s_mm[m - 1]) if m < n else np.zeros(m)
    # Rounding in the products themselves bounds what a residual can say.
    residuals = np.maximum(residuals, torch.finfo(space.vectors.dtype).eps * space.largest)
    gaps = np.maximum(_gaps(values, residuals), residuals)
    errors = residuals * np.divide(residuals, gaps, out=np.zeros(m), where=gaps > 0)
    order = np.argsort(-np.abs(values))
    wanted, others = order[:k], order[k:]
    small = errors[wanted] <= np.maximum(tolerance * np.abs(values[wanted]), np.finfo(float).tiny)
    reach = np.abs(values[others]) + _NEAR * residuals[others]
    below = reach <= (1 + tolerance) * np.abs(values[wanted]).min()
    converged = m >= min(k + 1, n) and bool(small.all() and (space.restarted or below.all()))
    return Ritz(values[wanted], residuals[wanted], errors[wanted], s_mm[:, wanted], converged)


def _gaps(values: NDArray[np.float64], residuals: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each value is from the next, less that one's own uncertainty; 0 where there is no other to tell."""
    if len(values) == 1:
        return np.zeros(1)
    distance = np.abs(values[:, None] - values[None, :]) - residuals[None, :]
    np.fill_diagonal(distance, np.finfo(float).max)
    return distance.min(axis=1)  # type: ignore[no-any-return]


def quadrature(
    product: Product, start: Tensor, steps: int, go_on: Callable[[], bool] = lambda: True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights with start^T f(A) start = |start|^2 sum_i weight_i f(node_i), exact for f of degree < 2 steps.

    The weights, which sum to 1, are the squared first components of T's eigenvectors [Golub & Welsch 1969].
    `go_on` is asked between products; a no makes it the rule of the steps so far.
    """
    steps = min(steps, len(start))
    space = Basis(product, start, steps)
    while True:
        space.grow()
        if space.beta == 0.0 or space.size == steps or not go_on():
            break
    nodes, s_mm = np.linalg.eigh(space.projected[: space.size, : space.size])
    return nodes, s_mm[0] ** 2
