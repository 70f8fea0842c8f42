"""Sharpness of the minimum: largest eigenvalue, trace and spectral density of the Hessian [chen2022 App. F].

The Hessian is that of the mean softmax cross-entropy over all images, without weight decay, at the network's weights.

    lambda_max   the eigenvalue of largest magnitude, with its sign; also of the diagonal blocks of the embedding, of
                 the positions, of all MSAs, of all token MLPs, of all (channel) MLPs, of all convs, and of each block
                 of the network: the columns of Table 4
    trace        E[v^T H v] over vectors of random signs [Hutchinson 1990], with a t interval
    density      of all eigenvalues: nodes and weights of stochastic Lanczos quadrature [Ghorbani et al. 2019]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import AnatomyError
from vitclinic._core.records import Scalar, UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Kind
from vitclinic.anatomy.table import parameters_by_unit
from vitclinic.data.randomness import torch_seed
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.curvature_probe import CurvatureProbe
from vitclinic.probes.curvature.hessian import Hessian, held_by_products
from vitclinic.probes.curvature.lanczos import Eigenpairs, basis_size, largest_eigenpairs, quadrature
from vitclinic.probes.curvature.pixels import choose_network, predicts_masks
from vitclinic.probes.guards import SAVED_EVERY, Partial
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, Result, register
from vitclinic.probes.subject import Subject

Count = Annotated[int, Field(ge=0)]
_GROUPS: dict[str, tuple[Kind, ...]] = {
    "embedding": ("stem",),
    "position": ("position",),
    "msa": ("msa",),
    "token_mlp": ("token_mlp",),
    "mlp": ("mlp",),
    "conv": ("conv",),
}
_PRODUCTS = 10
"""Typical number of products per eigenvalue, for the estimate of the cost."""
_PASSES = 6
"""Cost of a product in forward passes; a product with a component costs half of that."""


@register
class Sharpness(CurvatureProbe):
    """Largest Hessian eigenvalue, in total and per component, trace and spectral density [chen2022 App. F].

    H is the Hessian of the mean softmax cross-entropy over all images, or over the known pixels of each image if the
    network predicts masks. `lambda_max` is the eigenvalue of largest
    magnitude (Lanczos), `trace` the mean of v^T H v over random signs v [Hutchinson 1990], and the density is computed
    by stochastic Lanczos quadrature [Ghorbani et al. 2019].

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> probe = Sharpness(images=4, components=False, trace_draws=2, density_draws=0, max_products=5)
        >>> probe(model, loader).scalars["trace"].n
        2
    """

    name = "sharpness"
    group = "Curvature"
    rank = 150
    title = "Sharpness"
    question = "How curved is the loss where training ended, and which parts are?"
    paper = "Chen et al. 2022, Table 4, App. F (C1, C4)"
    key_scalars: ClassVar[KeyScalars] = {"lambda_max": "nearer to 0", "trace": "nearer to 0"}
    revision: ClassVar[int] = 3  # the embedding without positions, and token MLPs apart from channel MLPs
    cheaper: ClassVar[Cheaper] = (
        {"images": 32, "components": False, "density_draws": 0},
        {"images": 32},
        {"images": 64},
    )

    images: Annotated[int, Field(ge=1)] = Field(128, description="number of images")
    tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(1e-3, description="relative error of the eigenvalues")
    max_products: Annotated[int, Field(ge=1)] = Field(200, description="maximum Hessian-vector products per eigenvalue")
    components: bool = Field(True, description="also measure each component, if the network's anatomy is known")
    trace_draws: Count = Field(10, description="random vectors for the trace; 0 skips it")
    density_draws: Count = Field(1, description="random vectors for the density; 0 skips it")
    density_steps: Annotated[int, Field(ge=2)] = Field(20, description="products per vector of the density")

    def requirements(self, subject: Subject) -> frozenset[Need]:
        return frozenset({"gradients"}) if predicts_masks(subject) else self.needs

    def check(self, subject: Subject) -> None:
        if self.loss == "sigmoid" and predicts_masks(subject):
            raise DoesNotApply("the loss of pixels is that of softmax: leave out loss=sigmoid.")

    def forwards(self, subject: Subject) -> float:
        whole, blocks = self.estimate_products(subject)
        return _PASSES * (whole + blocks / 2) * len(subject)

    def peak_memory(self, subject: Subject) -> float:
        kept = max(basis_size(subject.footprint.vector, 1, self.max_products), self.density_steps)
        return held_by_products(subject, len(subject), subject.batch_size, kept + 2)  # one more, and the start

    def estimate_products(self, subject: Subject) -> tuple[int, int]:
        """Return the expected number of products with the whole Hessian, and with the blocks of its components."""
        whole = _PRODUCTS + self.trace_draws + self.density_draws * self.density_steps
        return whole, _PRODUCTS * len(list(components(subject))) if self.components else 0

    def measure(self, subject: Subject) -> Result:
        clock = Clock(self.budget, distributed=subject.distributed)
        surface = self.surface(subject)
        with surface.gradient_mode():
            surface.check()
            return _BudgetedMeasurement(self, subject, Hessian(surface), clock).result()


def quadratic_form(product: Callable[[Tensor], Tensor], vector: Tensor) -> float:
    """Return v^T H v, in float64; over vectors of random signs its mean is the trace [Hutchinson 1990]."""
    return float(vector.double() @ product(vector).double())


class _BudgetedMeasurement:
    """Measurements in order of importance, as far as the budget goes.

    `done` holds finished results (an eigenvalue, a draw) by name, and the number of products so far.
    """

    def __init__(self, probe: Sharpness, subject: Subject, hessian: Hessian, clock: Clock) -> None:
        self.probe, self.subject, self.hessian, self.clock = probe, subject, hessian, clock
        self.partial = Partial(subject.scratch.get(probe.name), distributed=subject.distributed)
        self.done: dict[str, NDArray[Any]] = self.partial.read() or {"products": np.array(0)}
        hessian.products = int(self.done["products"])
        self.expected = sum(probe.estimate_products(subject))
        self.missing: list[str] = []
        self.scalars: dict[str, Scalar] = {}
        self.units: list[UnitRow] = []
        self.arrays: dict[str, NDArray[Any]] = {}

    def result(self) -> Result:
        try:
            return self._result()
        finally:
            self.partial.write(self.done)

    def _result(self) -> Result:
        surface = self.hessian.surface
        self.scalars["loss"] = Scalar(value=surface.value())
        self.scalars["lambda_max"] = self._largest("lambda_max", self.hessian.product, surface.size)
        self._trace()
        if self.probe.components:
            self._components()
        self._density()
        self.scalars["products"] = Scalar(value=self.hessian.products)
        found = Result(self.scalars, self.units, self.arrays, mode=self.probe.batch_norm)
        reasons = [f"unfinished: {', '.join(self.missing)}"] if self.missing else []
        if coarse := surface.coarseness(self.probe.tolerance):
            reasons.append(coarse)
        return found.unless("; ".join(reasons) + "." if reasons else None)

    def _keep(self, what: str, found: NDArray[Any]) -> None:
        self.done[what] = found
        self.done["products"] = np.array(self.hessian.products)
        self.partial.write(self.done, every=SAVED_EVERY)

    def _largest(self, what: str, product: Callable[[Tensor], Tensor], size: int) -> Scalar:
        if what not in self.done:
            found, finished = self._eigenvalue(what, product, size)
            if finished:
                self._keep(what, found)
        else:
            found = self.done[what]
        value, error, converged = found.tolist()
        if not converged:
            self.missing.append(what)
            return Scalar(value=value)  # its error is the distance to some eigenvalue, not necessarily the largest
        return Scalar(value=value, low=value - error, high=value + error)

    def _eigenvalue(
        self, what: str, product: Callable[[Tensor], Tensor], size: int
    ) -> tuple[NDArray[np.float64], bool]:
        """Return [eigenvalue, error, converged], and True unless the budget cut it off."""
        in_time = True

        def go_on(products: int, found: object) -> bool:
            nonlocal in_time
            self._report_progress()
            in_time = not self.clock.has_expired()
            return in_time

        probe = self.probe
        found: Eigenpairs = largest_eigenpairs(
            product,
            self._random(what, size),
            1,
            tolerance=probe.tolerance,
            max_products=probe.max_products,
            go_on=go_on,
        )
        return np.array([found.values[0], found.errors[0], found.converged]), in_time

    def _trace(self) -> None:
        draws = self.done.get("trace", np.zeros(0))
        for draw in range(len(draws), self.probe.trace_draws):
            if self.clock.has_expired():
                self.missing.append(f"trace ({draw} of {self.probe.trace_draws} draws)")
                break
            signs = self._random(f"trace {draw}", self.hessian.surface.size).sign()
            draws = np.append(draws, quadratic_form(self.hessian.product, signs))
            self._keep("trace", draws)
            self._report_progress()
        if len(draws):
            running = RunningMean()
            running.add(draws)
            mean, half = float(running.mean), float(running.half_width())
            certain = running.n > 1
            low, high = (mean - half, mean + half) if certain else (None, None)
            self.scalars["trace"] = Scalar(value=mean, low=low, high=high, n=running.n)

    def _components(self) -> None:
        for component, row, owned in components(self.subject):
            what = f"lambda_max of {component}"
            if what not in self.done and self.clock.has_expired():
                self.missing.append(what)
                continue
            product, size = self.hessian.block(owned)
            found = self._largest(what, product, size)
            if row is None:
                self.scalars[f"lambda_max_{component}"] = found
            else:
                self.units.append(row.model_copy(update={"values": {"lambda_max": found}}))

    def _density(self) -> None:
        probe = self.probe
        rules = []
        for draw in range(probe.density_draws):
            what = f"density {draw}"
            if what not in self.done:
                found = None if self.clock.has_expired() else self._rule(what)
                if found is None:
                    self.missing.append(f"density ({draw} of {probe.density_draws} draws)")
                    break
                self._keep(what, found)
            rules.append(self.done[what])
        if rules:
            nodes, weights = np.concatenate(rules, axis=1)
            self.arrays["density_nodes"] = nodes
            self.arrays["density_weights"] = weights / len(rules)

    def _rule(self, what: str) -> NDArray[np.float64] | None:
        """Return the nodes and weights of one draw; None if the budget ended during it."""
        in_time = True

        def go_on() -> bool:
            nonlocal in_time
            in_time = not self.clock.has_expired()
            return in_time

        start = self._random(what, self.hessian.surface.size).sign()
        found = quadrature(self._with_progress(self.hessian.product), start, self.probe.density_steps, go_on)
        return np.stack(found) if in_time else None

    def _with_progress(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def reporting(vector: Tensor) -> Tensor:
            self._report_progress()
            return product(vector)

        return reporting

    def _report_progress(self) -> None:
        done, images = self.hessian.products, len(self.subject)
        self.subject.progress(self.probe.name, done * images, max(done, self.expected) * images)

    def _random(self, what: str, size: int) -> Tensor:
        surface = self.hessian.surface
        generator = torch.Generator().manual_seed(torch_seed(f"sharpness {what}", self.subject.seed))
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.to(surface.weights[0].device, surface.vector_dtype)


def components(subject: Subject) -> Iterator[tuple[str, UnitRow | None, list[str]]]:
    """Yield the diagonal blocks: name, the row it is reported in (None for a scalar), and the names of its parameters.

    Yields nothing if the network's structure is not known; the numbers of the whole network need no anatomy.
    """
    try:
        anatomy = subject.anatomy
    except AnatomyError:
        return
    names = {id(p): name for name, p in choose_network(subject).named_parameters()}
    owned = {unit: [names[id(p)] for p in found] for unit, found in parameters_by_unit(anatomy).items()}
    for group, kinds in _GROUPS.items():
        units = anatomy.of_kind(*kinds)
        if together := [name for unit in units for name in owned[unit.name]]:
            yield group, None, together
    for block in anatomy.blocks:
        row = UnitRow(name=block.name, kind="block", stage=block.stage, depth=block.units[0].depth, values={})
        yield block.name, row, [name for unit in block.units for name in owned[unit.name]]
