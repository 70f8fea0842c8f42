"""Hessian max-eigenvalue spectrum [park2022 App. A].

For each mini-batch of training images, augmented as in training: the eigenvalues of largest magnitude, with their sign,
of the Hessian of cross-entropy + (wd/2)|w|^2. The spectrum is their density over many mini-batches;

    NEP  the share of negative eigenvalues
    APE  the mean of the positive eigenvalues

Intervals are by the jackknife over mini-batches, since the eigenvalues of a mini-batch are not independent. NEP has
Wilson's interval if all mini-batches have the same share of negative eigenvalues, and there is no APE if none is
positive. Weight decay shifts the eigenvalues of decayed directions by wd. Soft labels of mixup and CutMix are part of
the loss; dropout and stochastic depth are off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from vitclinic._core.io import fingerprint
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import jackknife_half_width, share_interval
from vitclinic._core.time import Time
from vitclinic.data.randomness import torch_seed
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.curvature_probe import build_surface
from vitclinic.probes.curvature.hessian import Hessian, held_by_products
from vitclinic.probes.curvature.lanczos import Eigenpairs, basis_size, largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossName, LossSurface, Mode
from vitclinic.probes.guards import SAVED_EVERY, Partial
from vitclinic.probes.probe import Cheaper, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

Count = Annotated[int, Field(ge=1)]
Values = NDArray[np.float64]
_PRODUCTS, _PASSES = 26, 6
"""Typical cost of a mini-batch: products, and forward passes per product."""
_KEPT = ("values", "residuals", "errors", "products", "converged")


@register
class HessianSpectrum(OwningProbe):
    """Top Hessian eigenvalues of training mini-batches: their spectrum, NEP and APE [park2022 Fig. 1c, 4].

    NEP is the share of negative eigenvalues, APE the mean of the positive ones, of the Hessian of cross-entropy
    + (wd/2)|w|^2.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> HessianSpectrum(batches=1, batch=4, top=1, max_products=5)(model, loader).arrays["eigenvalues"].shape
        (1, 1)
    """

    name = "hessian_spectrum"
    group = "Curvature"
    rank = 140
    title = "Hessian spectrum"
    question = "Is the loss convex there (NEP), and how steep is it (APE)?"
    paper = "Park and Kim 2022, Fig. 1c, 4 (P1)"
    key_scalars: ClassVar[KeyScalars] = {"nep": "lower", "ape": "lower"}
    revision: ClassVar[int] = 2  # finds eigenvalues that were missed before
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits", "gradients"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"batches": 4}, {"batches": 8})

    batches: Count = Field(16, description="number of mini-batches")
    batch: Count = Field(16, description="images per mini-batch")
    top: Count = Field(5, description="eigenvalues per mini-batch")
    augment: bool = Field(True, description="augment as in the run's training, if it is known")
    regulariser: bool = Field(True, description="add the run's weight decay to the loss, if it is known")
    loss: LossName = Field("softmax", description="cross-entropy of softmax, or of each class's sigmoid")
    batch_norm: Mode = Field("eval", description="BatchNorm statistics: running (eval), or of each batch (train)")
    tolerance: Annotated[float, Field(gt=0, lt=1)] = Field(1e-3, description="relative error of the eigenvalues")
    max_products: Count = Field(200, description="maximum Hessian-vector products per mini-batch")
    budget: Time | None = Field(
        None, description="time limit, as in 2m; the result is then over the mini-batches so far"
    )

    def view(self, subject: Subject) -> Subject:
        return subject.on("train")

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the augmentation and weight decay of the loss."""
        training = subject.training
        augment = training.augment.identity() if training is not None and self.augment else None
        decay = training.decay if training is not None and self.regulariser else 0.0
        decayed = {"decayed": fingerprint(sorted(training.decayed))} if training is not None and decay else {}
        return {"augment": augment, "weight_decay": decay, **decayed}

    def forwards(self, subject: Subject) -> float:
        return float(_PASSES * _PRODUCTS * self.batches * self.batch)

    def peak_memory(self, subject: Subject) -> float:
        kept = basis_size(subject.footprint.vector, self.top, self.max_products)
        # One vector more, and the start as it was drawn, in float64, and as it is used.
        return held_by_products(subject, self.batch, self.batch, kept + 4)

    def measure(self, subject: Subject) -> Result:
        clock = Clock(self.budget, distributed=subject.distributed)
        partial = Partial(subject.scratch.get(self.name), distributed=subject.distributed)
        found = _unpack(partial.read())
        remaining = range(len(found), self.batches)
        cut_off: list[Eigenpairs] = []
        try:
            for some in subject.distributed.rounds(len(remaining), self._own(subject, remaining, clock)):
                found += [pairs for pairs, _ in takewhile(lambda each: each[1], some)]
                cut_off = [pairs for pairs, finished in some if not finished]
                partial.write(_pack(found), every=SAVED_EVERY)
                subject.progress(self.name, max(1, len(found)) * self.batch, self.batches * self.batch)
                if cut_off or clock.has_expired():
                    break
        finally:
            partial.write(_pack(found))
        coarse = build_surface(subject, []).coarseness(self.tolerance)
        return self._result(found or cut_off[:1], coarse)

    def _own(self, subject: Subject, remaining: range, clock: Clock) -> Iterator[tuple[Eigenpairs, bool]]:
        """Yield the eigenvalues of this process's mini-batches, and whether they were finished within the budget."""
        numbers = remaining[subject.distributed.rank :: subject.distributed.size]
        drawn = subject.augmented_batches(self.batch, self.batches, self.augment, which=numbers)
        for number, batch in zip(numbers, drawn, strict=True):
            surface = build_surface(subject, [batch], self.batch_norm, loss=self.loss, regularised=self.regulariser)
            with surface.gradient_mode():
                if number == numbers[0]:
                    surface.check()
                found = self._top(surface, torch_seed(f"hessian_spectrum {number}", subject.seed), clock)
            yield found

    def _top(self, surface: LossSurface, seed: int, clock: Clock) -> tuple[Eigenpairs, bool]:
        """Return the eigenvalues of a mini-batch, and True unless the budget cut them off."""
        in_time = True

        def go_on(products: int, found: object) -> bool:
            nonlocal in_time
            in_time = not clock.is_late()
            return in_time

        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(surface.size, generator=generator, dtype=torch.float64)
        start = drawn.to(surface.weights[0].device, surface.vector_dtype)
        found = largest_eigenpairs(
            Hessian(surface).product,
            start,
            self.top,
            tolerance=self.tolerance,
            max_products=self.max_products,
            go_on=go_on,
        )
        return replace(found, vectors=found.vectors[:0]), in_time  # vectors are as large as the network, and not needed

    def _result(self, found: list[Eigenpairs], coarse: str | None) -> Result:
        values = np.stack([pairs.values for pairs in found])
        scalars = {
            "nep": negative_proportion(values),
            "largest": Scalar(value=float(values.max()), n=len(values)),
            "smallest": Scalar(value=float(values.min()), n=len(values)),
            "products": Scalar(value=sum(pairs.products for pairs in found)),
        }
        if (values > 0).any():
            scalars["ape"] = jackknife(values, positive_mean, least=0.0)
        arrays = {
            "eigenvalues": values,
            "residuals": np.stack([pairs.residuals for pairs in found]),
            "errors": np.stack([pairs.errors for pairs in found]),
        }
        missing = [] if coarse is None else [coarse]
        if len(found) < self.batches:
            missing.append(f"the budget ended after {len(found)} of {self.batches} mini-batches")
        if loose := [pairs.products for pairs in found if not pairs.converged]:
            missing.append(f"{len(loose)} of {len(found)} mini-batches have not converged in {max(loose)} products")
        result = Result(scalars, arrays=arrays, mode=self.batch_norm)
        return result.unless("; ".join(missing) + "." if missing else None)


def _pack(found: list[Eigenpairs]) -> dict[str, NDArray[Any]]:
    """Return the eigenvalues as arrays with one row per mini-batch."""
    return {name: np.array([getattr(pairs, name) for pairs in found]) for name in _KEPT}


def _unpack(arrays: Mapping[str, NDArray[Any]] | None) -> list[Eigenpairs]:
    if arrays is None:
        return []
    rows = zip(*(arrays[name] for name in _KEPT), strict=True)
    return [
        Eigenpairs(values, residuals, errors, torch.empty(0), int(products), bool(converged))
        for values, residuals, errors, products, converged in rows
    ]


def negative_share(values: Values) -> float:
    """Return the NEP of eigenvalues of any shape."""
    return float((values < 0).mean())


def positive_mean(values: Values) -> float:
    """Return the APE of eigenvalues of any shape; NaN if none is positive."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else math.nan


def negative_proportion(values: Values) -> Scalar:
    """Return NEP with a jackknife interval, or Wilson's if all rows have the same share and so no spread."""
    found, n = jackknife(values, negative_share, least=0.0, most=1.0), len(values)
    if n < 2 or np.ptp((values < 0).mean(axis=1)) > 0:
        return found
    low, high = share_interval(round(found.value * n), n)
    return Scalar(value=found.value, low=low, high=high, n=n)


def jackknife(
    values: Values, statistic: Callable[[Values], float], *, least: float = -math.inf, most: float = math.inf
) -> Scalar:
    """Return a statistic of the rows of `values`, with a 95% jackknife interval over rows.

    The statistic lies between `least` and `most`. There is no interval if it is undefined without one of the rows.
    """
    whole, n = statistic(values), len(values)
    if n < 2:
        return Scalar(value=whole, n=n)
    without = np.array([statistic(np.delete(values, row, axis=0)) for row in range(n)])
    if np.isnan(without).any():
        return Scalar(value=whole, n=n)
    half = float(jackknife_half_width(without))
    return Scalar(value=whole, low=max(least, whole - half), high=min(most, whole + half), n=n)
