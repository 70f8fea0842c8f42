"""Loss landscape on a line or a plane through the weights [Li et al. 2018; chen2022 Fig. 1; park2022 Fig. 1a]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.data.randomness import torch_seed
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.curvature_probe import CurvatureProbe, build_surface
from vitclinic.probes.curvature.directions import (
    Direction,
    Normalisation,
    OneDimensional,
    coordinates,
    digest,
    displacements,
    normalize_direction,
    principal_directions,
    random_direction,
    top_eigenvectors,
)
from vitclinic.probes.curvature.displacement import Displacement
from vitclinic.probes.curvature.hessian import free_memory, held_by_products
from vitclinic.probes.curvature.lanczos import basis_size
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.guards import SAVED_EVERY, Partial
from vitclinic.probes.past_training import PastWeights
from vitclinic.probes.probe import Cheaper, DoesNotApply, Result, register
from vitclinic.probes.subject import Subject

_PRODUCTS, _PRODUCT = 40, 4
"""Estimated cost of eigenvectors: Hessian-vector products, and forward passes per product."""


class Grid:
    """Losses on a grid of `points` per axis, on one or two axes from -span to span, with w in the middle.

    An even number has w between its points, as the 50 x 50 of chen2022. `losses` is NaN where `evaluated` is False;
    where it is True, a loss may still be NaN or infinite.
    """

    def __init__(self, points: int = 21, span: float = 1.0, dimensions: int = 2) -> None:
        self.axis = span * (2 * np.arange(points) - (points - 1)) / (points - 1)
        self.losses = np.full((points,) * dimensions, np.nan)
        self.evaluated = np.zeros(self.losses.shape, dtype=bool)

    def remaining(self) -> list[tuple[int, ...]]:
        """Return the points to evaluate, from the centre outwards, so that a partial grid is a smaller landscape."""
        places = np.argwhere(~self.evaluated)
        distances = ((2 * places - (len(self.axis) - 1)) ** 2).sum(axis=1)
        return [tuple(place) for place in places[np.argsort(distances, kind="stable")].tolist()]

    def fill(
        self, surface: LossSurface, directions: Sequence[Direction], go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Evaluate the remaining points; `go_on` is called after each, and stops the loop if it returns False.

        Point (i, j) is w + axis[i] directions[0] + axis[j] directions[1]. Use it inside `surface.evaluation_mode()`.
        """
        with Displacement(surface.weights) as displacement:
            for place in self.remaining():
                displacement.along(directions, [float(self.axis[at]) for at in place])
                self.losses[place] = surface.value()
                self.evaluated[place] = True
                if not go_on():
                    break

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"losses": self.losses, "evaluated": self.evaluated}

    def take(self, arrays: dict[str, NDArray[Any]] | None) -> None:
        """Resume from the arrays of an earlier attempt."""
        if arrays is not None:
            self.losses[...], self.evaluated[...] = arrays["losses"], arrays["evaluated"]


@dataclass(frozen=True)
class _Plane:
    """Directions, with scalars and arrays that describe them."""

    directions: list[Direction]
    scalars: dict[str, Scalar] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    shortcoming: str | None = None


@register
class Landscape(CurvatureProbe):
    """Loss on a line or a plane through the weights, along random directions, eigenvectors or the training trajectory.

    L(w + x d_1 + y d_2) on a grid, with softmax cross-entropy [chen2022], plus the run's weight decay, and on images
    augmented as in its training, if requested [park2022]. `directions` chooses the d, and `normalisation` their
    lengths [Li et al. 2018].

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> Landscape(points=3)(model, loader).arrays["losses"].shape
        (3, 3)
    """

    name = "landscape"
    group = "Curvature"
    rank = 180
    title = "Loss landscape"
    question = "What does the loss look like around the weights?"
    paper = "Chen et al. 2022, Fig. 1; Park and Kim 2022, Fig. 1a (C1, P15)"
    key_scalars: ClassVar[KeyScalars] = {"largest_loss": None}
    revision: ClassVar[int] = 2  # finds eigenvalues that were missed before
    cheaper: ClassVar[Cheaper] = ({"points": 11, "images": 64}, {"points": 15, "images": 128})

    dimensions: Literal[1, 2] = Field(2, description="1 for a line, 2 for a plane")
    points: Annotated[int, Field(ge=3)] = Field(21, description="points per axis; the network is one of them if odd")
    span: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="each axis goes from -span to span"
    )
    directions: Literal["random", "eigenvectors", "trajectory"] = Field(
        "random",
        description="random (Gaussian), eigenvectors (of the Hessian's eigenvalues of largest magnitude), or trajectory"
        " (principal components of the run's weights over its epochs)",
    )
    normalisation: Normalisation | None = Field(
        None,
        description="filter (per output, Li et al. 2018), dim0 (park2022's code) or none (unit length); by default"
        " filter for random directions, none for eigenvectors, and the extent of the path for a trajectory",
    )
    one_dimensional: OneDimensional = Field(
        "zero", description="for filter and dim0: biases and norm layers stay fixed, or count as one filter each"
    )
    regulariser: Literal["none", "run"] = Field(
        "none", description="none (plain cross-entropy), or run (with the run's weight decay)"
    )
    augment: Literal["none", "run"] = Field(
        "none", description="none (plain images), or run (images as the run's training shows them, the same everywhere)"
    )

    def forwards(self, subject: Subject) -> float:
        products = _PRODUCTS * _PRODUCT if self.directions == "eigenvectors" else 0
        past = self._past(subject)
        read = 0 if past is None else 3 * len(past.weights)  # reading a checkpoint takes about as long as one image
        return float(self.points**self.dimensions + products + 2) * len(subject) + read

    def peak_memory(self, subject: Subject) -> float:
        """Return what the directions take beside the loss at displaced weights, or what finding them does."""
        footprint = subject.footprint
        made = 2.0 * self.dimensions * footprint.weights  # before they are normalized, and after
        if self.directions == "eigenvectors":
            kept = basis_size(footprint.vector, self.dimensions, 300) + 2
            made = max(made, held_by_products(subject, len(subject), subject.batch_size, kept))
        return max(made, super().peak_memory(subject) + self.dimensions * footprint.weights)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        conditions = super().conditions(subject)
        if self.regulariser == "run" and subject.training is not None:
            conditions["decay"] = subject.training.decay
        if self.augment == "run" and subject.training is not None:
            conditions["augment"] = subject.training.augment.identity()
        past = self._past(subject)
        if past is not None:
            conditions["weights"] = past.digest()
        return conditions

    def _past(self, subject: Subject) -> PastWeights | None:
        """Return the weights over the epochs, if the directions depend on them."""
        return subject.training.past if self.directions == "trajectory" and subject.training is not None else None

    def measure(self, subject: Subject) -> Result:
        for option, needed in (("regulariser", "weight decay"), ("augment", "augmentation")):
            if getattr(self, option) == "run" and subject.training is None:
                raise DoesNotApply(
                    f"{option}: run needs the {needed} of the training, and how the network was trained is not known."
                )
        clock = Clock(self.budget, distributed=subject.distributed)
        surface = self.surface(subject, regularised=self.regulariser == "run")
        with surface.evaluation_mode():
            loss = surface.check()
        plane = self._plane(subject, surface)
        grid = Grid(self.points, self.span, self.dimensions)
        partial = Partial(subject.scratch.get(self.name), digest(plane.directions), subject.distributed)
        grid.take(partial.read())

        def go_on() -> bool:
            partial.write(grid.arrays(), every=SAVED_EVERY)
            subject.progress("landscape", int(grid.evaluated.sum()) * len(subject), grid.losses.size * len(subject))
            return not clock.has_expired()

        try:
            with surface.evaluation_mode():
                grid.fill(surface, plane.directions, go_on)
        finally:
            partial.write(grid.arrays())
        return self._result(grid, plane, loss)

    def surface(self, subject: Subject, *, regularised: bool = False) -> LossSurface:
        if self.augment == "none":
            return super().surface(subject, regularised=regularised)
        size, distributed = subject.batch_size, subject.distributed
        mine = range(-(-self.images // size))[distributed.rank :: distributed.size]
        drawn = zip(mine, subject.augmented_batches(size, len(mine), which=mine), strict=True)
        batches = [batch.split(min(size, self.images - number * size))[0] for number, batch in drawn]
        return build_surface(
            subject, batches, self.batch_norm, loss=self.loss, regularised=regularised, distributed=distributed
        )

    def _plane(self, subject: Subject, surface: LossSurface) -> _Plane:
        if self.directions == "trajectory":
            return self._principal_plane(subject, surface)
        seeds = [torch_seed("landscape", subject.seed, number) for number in range(self.dimensions)]
        if self.directions == "random":
            raw = [random_direction(surface.weights, seed) for seed in seeds]
            return _Plane(self._normalize(raw, surface, "filter"))
        clock = Clock(self.budget, share=0.5, distributed=subject.distributed)  # the rest is for the grid
        raw, found = top_eigenvectors(surface, self.dimensions, seeds[0], lambda *_: not clock.has_expired())
        scalars = {f"eigenvalue_{number}": Scalar(value=value) for number, value in enumerate(found.values.tolist(), 1)}
        short = f"the eigenvectors had not converged after {found.products} Hessian-vector products"
        return _Plane(self._normalize(raw, surface, "none"), scalars, shortcoming=None if found.converged else short)

    def _principal_plane(self, subject: Subject, surface: LossSurface) -> _Plane:
        """Return the principal directions of the training, and the coordinates of its epochs."""
        moved = displacements(subject, surface)
        reads = list(moved.values())
        found = principal_directions(reads, self.dimensions, free_memory(surface.weights[0].device) // 2)
        if len(found.directions) < self.dimensions:
            raise DoesNotApply(
                f"the weights of the run's kept epochs ({', '.join(f'{epoch:g}' for epoch in moved)}) differ from the"
                f" network's in {len(found.directions)} directions; keep more (checkpoint.keep_epochs)."
            )
        directions = found.directions
        path = coordinates(reads, directions)
        if self.normalisation is None:
            reach = np.abs(path).max(axis=0)
            directions = [[far * d for d in direction] for far, direction in zip(reach, directions, strict=True)]
            path = path / reach
        elif self.normalisation != "none":
            directions = self._normalize(directions, surface, self.normalisation)
            path = coordinates(reads, directions)
        lengths = [float(surface.flat(direction).double().norm()) for direction in directions]
        scalars = {f"explained_{number}": Scalar(value=float(share)) for number, share in enumerate(found.shares, 1)}
        scalars |= {f"length_{number}": Scalar(value=length) for number, length in enumerate(lengths, 1)}
        return _Plane(directions, scalars, {"path": path, "path_epoch": np.array(list(moved))})

    def _normalize(self, raw: Sequence[Direction], surface: LossSurface, usual: Normalisation) -> list[Direction]:
        how = self.normalisation or usual
        return [normalize_direction(direction, surface.weights, how, self.one_dimensional) for direction in raw]

    def _result(self, grid: Grid, plane: _Plane, loss: float) -> Result:
        losses = grid.losses[grid.evaluated]
        scalars = {
            "loss": Scalar(value=loss),
            "largest_loss": Scalar(value=float(np.nanmax(losses))),
            "points_not_finite": Scalar(value=float((~np.isfinite(losses)).sum())),
            **plane.scalars,
        }
        axes = dict.fromkeys(("x", "y")[: self.dimensions], grid.axis)
        reasons = [] if plane.shortcoming is None else [plane.shortcoming]
        if not grid.evaluated.all():
            reasons.append(f"{grid.evaluated.mean():.0%} of the points are evaluated, from the centre outwards")
        return Result(
            scalars,
            arrays=axes | grid.arrays() | plane.arrays,
            status="not_converged" if reasons else "ok",
            reason=f"{'; '.join(reasons)}." if reasons else None,
            mode=self.batch_norm,
        )
