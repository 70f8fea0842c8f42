"""Lanczos against dense eigenproblems."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitclinic.probes.curvature.lanczos import largest_eigenpairs, quadrature


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A dense float64 matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return q @ torch.diag(values.double()) @ q.T


def start(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_finds_the_largest_magnitudes_with_sign_of_any_symmetric_matrix(n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T
    found = largest_eigenpairs(lambda v: matrix @ v, start(n), k, tolerance=1e-9)
    exact = torch.linalg.eigvalsh(matrix)
    exact = exact[exact.abs().argsort(descending=True)][: min(k, n)]
    assert found.converged
    np.testing.assert_allclose(found.values, exact.numpy(), rtol=1e-8)
    for value, vector, residual in zip(found.values, found.vectors, found.residuals, strict=True):
        assert float((matrix @ vector - value * vector).norm()) <= residual + 1e-10 * abs(value)


def test_equal_eigenvalues_are_all_found() -> None:
    matrix = symmetric(torch.tensor([4.0, 4.0, 4.0, -2.0, 1.0, 0.0, 0.0, 0.0]))
    found = largest_eigenpairs(lambda v: matrix @ v, start(8), 5, tolerance=1e-9)
    np.testing.assert_allclose(found.values, [4, 4, 4, -2, 1], rtol=1e-8)


def test_values_that_a_start_has_little_of_are_not_missed() -> None:
    """The spectrum of a trained ViT: of 43.97 and 43.45 one comes out late, and -36.5 would be taken for the fifth."""
    largest = [100.82, 84.81, 68.85, 43.97, 43.45, 37.23, -36.5, 35.07, -33.39, 31.34, 29.07, 27.63, 25.59, -25.51]
    bulk = 25 * np.sign(np.linspace(-1, 1, 400)) * np.abs(np.linspace(-1, 1, 400)) ** 3
    values = torch.from_numpy(np.concatenate([largest, bulk]))
    few = torch.cat([torch.full((len(largest),), 1e-3), torch.full((len(bulk),), 0.05)]).double()
    for seed in range(50):
        found = largest_eigenpairs(lambda v: values * v, few * start(len(values), seed), 5)
        assert found.converged
        np.testing.assert_allclose(found.values, largest[:5], rtol=1e-3)


@pytest.mark.parametrize("basis", [12, 16, 40])
def test_a_small_basis_restarts_and_finds_the_same(basis: int) -> None:
    values = torch.cat([torch.linspace(-1, 1, 300), torch.tensor([1.5, -1.4, 1.3])])
    matrix = symmetric(values)
    sizes: list[int] = []
    found = largest_eigenpairs(
        lambda v: matrix @ v,
        start(303),
        3,
        tolerance=1e-6,
        basis=basis,
        go_on=lambda products, ritz: sizes.append(len(ritz.coefficients)) or True,
    )
    assert found.converged
    assert max(sizes) <= basis
    np.testing.assert_allclose(found.values, [1.5, -1.4, 1.3], rtol=1e-6)


def test_a_stop_before_convergence_says_so_and_its_errors_hold() -> None:
    matrix = symmetric(torch.linspace(-1, 1, 200))
    found = largest_eigenpairs(lambda v: matrix @ v, start(200), 5, max_products=12)
    assert not found.converged
    assert found.products == 12
    exact = torch.linalg.eigvalsh(matrix)
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert float((exact - value).abs().min()) <= residual * (1 + 1e-9)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(5))
def test_the_errors_of_converged_values_hold_and_are_not_zero(seed: int, tolerance: float) -> None:
    values = torch.cat([torch.linspace(-1, 1, 100), torch.tensor([2.0, -1.7, 1.4])])
    matrix = symmetric(values, seed)
    found = largest_eigenpairs(lambda v: matrix @ v, start(103, seed + 9), 3, tolerance=tolerance)
    assert found.converged
    exact = torch.linalg.eigvalsh(matrix).numpy()
    off = np.abs(exact[:, None] - found.values).min(axis=0)
    assert (found.errors > 0).all()
    assert (off <= found.errors * (1 + 1e-6) + 1e-13).all()
    assert (found.errors <= tolerance * np.abs(found.values)).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_errors_of_products_in_single_precision_hold(seed: int) -> None:
    """The matrix itself is rounded there: a ResNet's 493.2419 +- 0.0012 was 493.2453 in double precision."""
    matrix = symmetric(torch.cat([torch.tensor([500.0]), torch.linspace(-1, 1, 799)]), seed)
    single = matrix.float()
    found = largest_eigenpairs(lambda v: single @ v, start(800, seed).float(), 1, tolerance=1e-3)
    exact = float(torch.linalg.eigvalsh(matrix)[-1])
    assert found.converged
    assert abs(found.values[0] - exact) <= found.errors[0] <= 1e-3 * exact


def test_the_error_after_one_product_is_the_residual() -> None:
    matrix = symmetric(torch.linspace(-1, 1, 50))
    found = largest_eigenpairs(lambda v: matrix @ v, start(50), 1, max_products=1)
    assert not found.converged
    assert found.errors.tolist() == found.residuals.tolist()
    assert found.errors[0] > 0.1


def test_the_zero_matrix_has_eigenvalue_zero() -> None:
    found = largest_eigenpairs(lambda v: 0 * v, start(5), 3)
    assert found.values.tolist() == [0, 0, 0]


def test_a_product_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        largest_eigenpairs(lambda v: v * float("nan"), start(5), 1)


def test_quadrature_is_exact_for_polynomials_below_twice_its_steps() -> None:
    matrix = symmetric(torch.linspace(-2, 3, 60))
    v = start(60)
    nodes, weights = quadrature(lambda x: matrix @ x, v, 5)
    assert weights.sum() == pytest.approx(1)
    image = v
    for power in range(10):
        assert float(v @ v) * (weights * nodes**power).sum() == pytest.approx(float(v @ image), rel=1e-9)
        image = matrix @ image
