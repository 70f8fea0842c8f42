"""Formulas of the loss's Hessian: products, eigenvalues, trace, density, NEP and APE.

Where a function takes `loss`, that is one of

    a callable without arguments that returns the loss as a scalar tensor: `lambda: criterion(model(images), labels)`
    a tuple (model, criterion, batches): the mean over all samples of batches of (inputs, targets), one graph at a time

Put the model in evaluation mode before: a loss that is random from call to call has no Hessian. The criterion must
average over its batch, as torch's do. Attention is computed by a kernel that can be differentiated twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitclinic.anatomy import double_differentiable
from vitclinic.data.randomness import torch_seed
from vitclinic.functional.checks import check_parts, list_parameters
from vitclinic.probes.curvature import hessian_spectrum
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import largest_eigenpairs, quadrature
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.curvature.sharpness import quadratic_form

Criterion = Callable[[Any, Any], Tensor]
Loss = Callable[[], Tensor] | tuple[Callable[[Any], Any], Criterion, Iterable[Any]]


class Estimate(NamedTuple):
    """A mean over random draws."""

    mean: float
    standard_error: float
    """Standard error of the mean; NaN for a single draw."""
    draws: Tensor

    @classmethod
    def of(cls, draws: Tensor) -> Estimate:
        error = float(draws.std()) / len(draws) ** 0.5 if len(draws) > 1 else math.nan
        return cls(float(draws.mean()), error, draws)


class Surface(LossSurface):
    """The loss surface of a callable, or of model, criterion and batches."""

    def __init__(self, loss: Loss, params: Iterable[Tensor]) -> None:
        named = {str(place): p for place, p in enumerate(list_parameters(params))}
        super().__init__(nn.Module(), [], parameters=cast(dict[str, nn.Parameter], named))
        if not callable(loss) and not (isinstance(loss, tuple) and len(loss) == 3):
            raise ValueError(
                "The loss must be a function without arguments that computes it, or (model, criterion, batches) (got"
                f" {type(loss).__name__})."
            )
        self.loss = loss
        given: list[Any] = [None] if callable(loss) else list(loss[2])
        self.batches, self.images = given, 1 if callable(loss) else sum(len(batch[1]) for batch in given)
        if not self.images:
            raise ValueError("There are no batches to compute the loss on.")

    def total_loss(self, batch: Any) -> Tensor:
        """Return the loss of the callable, or the sum over the samples of a batch."""
        if callable(self.loss):
            found, samples = self.loss(), 1
        else:
            model, criterion, _ = self.loss
            found, samples = criterion(model(batch[0]), batch[1]), len(batch[1])
        if found.ndim:
            raise ValueError(f"The loss must be a scalar (got {tuple(found.shape)}); average it over the batch.")
        return found * samples if samples > 1 else found

    def random(self, purpose: str, seed: int) -> Tensor:
        """Draw a standard Gaussian vector [n], the same for a seed on any device."""
        generator = torch.Generator().manual_seed(torch_seed(purpose, seed))
        drawn = torch.randn(self.size, generator=generator, dtype=torch.float64)
        return drawn.to(self.weights[0].device, self.vector_dtype)


def hessian_vector_product(loss: Loss, params: Iterable[Tensor], vector: Sequence[Tensor]) -> list[Tensor]:
    """Return H v, where H is the Hessian of the loss with respect to the parameters: the gradient of (gradient . v).

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters; all others are held fixed.
        vector: The vector v, one tensor per parameter.

    Returns:
        H v, one tensor a parameter.

    References:
        Pearlmutter, Neural Computation 1994.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian_vector_product(lambda: (w**3).sum(), [w], [torch.ones(2)])  # diag(6 w) v
        [tensor([ 6., 12.])]
    """
    surface = Surface(loss, params)
    check_parts(vector, surface.weights, "vector")
    with double_differentiable(), torch.enable_grad():
        product = Hessian(surface, memory=0).product(surface.flat(list(vector)))
    return surface.split(product)


def hessian_eigenvalues(
    loss: Loss,
    params: Iterable[Tensor],
    k: int = 1,
    *,
    tolerance: float = 1e-3,
    max_products: int = 200,
    seed: int = 0,
) -> Tensor:
    """Return the k Hessian eigenvalues of largest magnitude, with their sign, by Lanczos.

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters: all of them, or those of a block for the block's diagonal part.
        k: How many.
        tolerance: Relative error of each at which to stop.
        max_products: Hessian-vector products at which to stop, whatever the error.
        seed: Of the vector to start from.

    Returns:
        [k] in float64, in descending magnitude; fewer where there are fewer parameters.

    References:
        park2022 App. A; chen2022 App. F (lambda_max, k = 1).

    Example:
        >>> w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        >>> a = torch.tensor([4.0, -6.0, 1.0])
        >>> hessian_eigenvalues(lambda: (a * w**2).sum() / 2, [w], k=2).round().tolist()
        [-6.0, 4.0]
    """
    if k < 1:
        raise ValueError(f"k must be at least 1 (got {k}).")
    surface = Surface(loss, params)
    with double_differentiable(), torch.enable_grad():
        start = surface.random("eigenvalues", seed)
        product = Hessian(surface).product
        found = largest_eigenpairs(product, start, k, tolerance=tolerance, max_products=max_products)
    return torch.from_numpy(found.values.copy())


def hessian_trace(loss: Loss, params: Iterable[Tensor], draws: int = 10, *, seed: int = 0) -> Estimate:
    """Estimate the trace of the Hessian with Hutchinson's method.

        trace(H) = E[v^T H v],   v of random signs

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters.
        draws: How many random vectors; one is exact where the Hessian is diagonal.
        seed: Of the vectors.

    Returns:
        The mean, its standard error, and the draws of v^T H v in float64.

    References:
        Hutchinson 1990; chen2022 App. F.

    Example:
        >>> w = torch.zeros(3, requires_grad=True)
        >>> hessian_trace(lambda: (torch.tensor([4.0, -6.0, 1.0]) * w**2).sum() / 2, [w], draws=2).mean
        -1.0
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1 (got {draws}).")
    surface = Surface(loss, params)
    with double_differentiable(), torch.enable_grad():
        hessian = Hessian(surface)
        signs = (surface.random(f"trace {draw}", seed).sign() for draw in range(draws))
        found = [quadratic_form(hessian.product, each) for each in signs]
    return Estimate.of(torch.tensor(found, dtype=torch.float64))


def hessian_density(
    loss: Loss, params: Iterable[Tensor], steps: int = 20, draws: int = 1, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Estimate the density of all Hessian eigenvalues, as nodes and weights, by stochastic Lanczos quadrature.

        1/n sum_i f(lambda_i) ~ sum_j weight_j f(node_j)

    Args:
        loss: A callable that returns a scalar, or (model, criterion, batches).
        params: The parameters.
        steps: Lanczos steps of each draw.
        draws: Random vectors.
        seed: Of the vectors.

    Returns:
        Nodes and weights, [steps * draws] each in float64; the weights sum to 1.

    References:
        Ghorbani et al., ICML 2019; chen2022 App. F.

    Example:
        >>> w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        >>> nodes, weights = hessian_density(lambda: (torch.tensor([1.0, 3.0]) * w**2).sum() / 2, [w])
        >>> [(round(node), round(weight, 3)) for node, weight in zip(nodes.tolist(), weights.tolist())]
        [(1, 0.5), (3, 0.5)]
    """
    if steps < 1 or draws < 1:
        raise ValueError(f"steps and draws must be at least 1 (got {steps} and {draws}).")
    surface = Surface(loss, params)
    with double_differentiable(), torch.enable_grad():
        hessian = Hessian(surface)
        signs = (surface.random(f"density {draw}", seed).sign() for draw in range(draws))
        rules = [quadrature(hessian.product, each, steps) for each in signs]
    nodes, weights = (np.concatenate(parts) for parts in zip(*rules, strict=True))
    return torch.from_numpy(nodes), torch.from_numpy(weights / draws)


def nep(eigenvalues: Tensor) -> float:
    """Return the negative eigenvalue proportion: the share of negative eigenvalues over all mini-batches.

    Args:
        eigenvalues: Of any shape, those of all mini-batches together.

    References:
        park2022 Sec. 2, App. A.

    Example:
        >>> nep(torch.tensor([[5.0, -1.0], [3.0, 2.0]]))
        0.25
    """
    return hessian_spectrum.negative_share(_values(eigenvalues))


def ape(eigenvalues: Tensor) -> float:
    """Return the average positive eigenvalue: the mean of the positive eigenvalues; NaN if there are none.

    Args:
        eigenvalues: Of any shape, those of all mini-batches together.

    References:
        park2022 Sec. 2, App. A.

    Example:
        >>> ape(torch.tensor([[5.0, -1.0], [3.0, 1.0]]))
        3.0
    """
    return hessian_spectrum.positive_mean(_values(eigenvalues))


def _values(eigenvalues: Tensor) -> Any:
    if not eigenvalues.numel():
        raise ValueError("There are no eigenvalues.")
    return eigenvalues.detach().double().cpu().numpy()
