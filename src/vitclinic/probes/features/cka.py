"""How alike the states after a network's units are: mini-batch linear CKA [park2022 Fig. 10a, D.3]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from vitclinic._core.errors import DataError, ModelError
from vitclinic._core.facts import KeyScalars
from vitclinic._core.records import Scalar
from vitclinic._core.statistics import jackknife_half_width
from vitclinic.anatomy import Anatomy, Site, Unit, stream
from vitclinic.data import Batch
from vitclinic.probes.features.hsic import LEAST, HSICSums, Matrix, gram
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Tally, register, unit_row
from vitclinic.probes.restoring import preserve_state
from vitclinic.probes.subject import Subject


@register
class CKA(StreamingProbe):
    """Similarity of the states after all pairs of units, mini-batch linear CKA [park2022 Fig. 10a, D.3].

    CKA(i, j) = HSIC(i, j) / sqrt(HSIC(i, i) HSIC(j, j)), each HSIC the unbiased one of a mini-batch averaged over
    mini-batches first (Nguyen et al. 2021). Features are a state's positions and channels, without prefix tokens.
    """

    name = "cka"
    group = "Representation"
    rank = 60
    title = "Similarity of layers (CKA)"
    question = "Which layers represent images alike?"
    paper = "Park and Kim 2022, Fig. 10a, D.3 (P9)"
    key_scalars: ClassVar[KeyScalars] = {"cka_mean": None, "block_structure": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    batch: Annotated[int, Field(ge=LEAST)] = Field(64, description="images of a mini-batch; at most the exam's batch")

    parts: Annotated[int, Field(ge=2)] | None = Field(
        None, description="cut a network of one stage into so many equal parts, so that block_structure has a control"
    )

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Mini-batches are cut out of the exam's batches, whose borders matter if `batch` does not divide them."""
        size, processes = subject.batch_size, subject.distributed.size
        if processes > 1:
            return {"batch_size": size, "processes": processes}
        return {} if size % self.batch == 0 or size >= len(subject) else {"batch_size": size}

    def begin(self, subject: Subject) -> Tally:
        at_once = min(self.batch, subject.batch_size, len(subject))
        if at_once < LEAST:
            raise DoesNotApply(f"CKA needs mini-batches of at least {LEAST} images, and here they have {at_once}.")
        return _Tally(subject.anatomy, self.batch, self.parts)


class _Tally(Tally):
    def __init__(self, anatomy: Anatomy, batch: int, parts: int | None) -> None:
        self.anatomy = anatomy
        self.parts = parts
        self.grams = _Grams(anatomy, batch)
        self.hsic = HSICSums(len(anatomy.units))

    def taps(self) -> Mapping[str, Site]:
        return self.grams.sites

    def update(self, key: str, activation: Tensor) -> None:
        self.grams.read(key, activation)

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        for grams in self.grams.take():
            self.hsic.add(grams)

    def sums(self) -> Mapping[str, HSICSums]:
        return {"hsic": self.hsic}

    def finish(self) -> Result:
        units = self.anatomy.units
        if not self.hsic.images.sum():
            raise DoesNotApply(f"no mini-batch has the {LEAST} images that CKA needs at least.")
        _check_finite(self.hsic, units)
        estimate = _Estimate(self.hsic)
        ours = np.eye(len(units))
        rows = [
            unit_row(
                unit,
                cka_mean=estimate.weighted_sum(_outer(ours[at], 1 - ours[at]) / (len(units) - 1)),
                **({"cka_previous": estimate.weighted_sum(_outer(ours[at], ours[at - 1]))} if at else {}),
            )
            for at, unit in enumerate(units)
        ]
        scalars = {
            "cka_mean": estimate.weighted_sum((1 - ours) / (1 - ours).sum()),
            "images": Scalar(value=float(estimate.images)),
        }
        blocks = _block_weights(_stages(units, self.parts))
        if blocks.any():
            scalars["block_structure"] = estimate.weighted_sum(blocks)
        return Result(scalars, rows, {"cka": estimate.cka})


class _Estimate:
    """CKA with what it is without each group of mini-batches, from which its intervals are."""

    def __init__(self, sums: HSICSums) -> None:
        self.cka = sums.cka()
        self.images = int(sums.images.sum())
        self._without_each = sums.without_each()

    def weighted_sum(self, weights: Matrix) -> Scalar:
        """The weighted sum of the matrix, by a jackknife over mini-batches."""
        value = float((weights * self.cka).sum())
        if not len(self._without_each):
            return Scalar(value=value, n=self.images)
        half = float(jackknife_half_width((weights * self._without_each).sum((1, 2))))
        bound = float(np.abs(weights).sum())  # that CKA is at most 1 is known without samples
        low, high = max(value - half, -bound), min(value + half, bound)
        return Scalar(value=value, low=min(low, value), high=max(high, value), n=self.images)


class _Grams:
    """Reads the states after the units of a network and keeps, of one batch, the Gram matrices of its mini-batches.

    A mini-batch has at most `batch` images, or is the whole batch.
    """

    def __init__(self, anatomy: Anatomy, batch: int | None = None) -> None:
        self.anatomy = anatomy
        self.batch = batch
        self.sites = {unit.name: unit.output for unit in anatomy.units}
        self._seen: dict[str, list[Tensor]] = {}

    def read(self, name: str, activation: Tensor) -> None:
        features = flatten_state(self.anatomy, self.sites[name], activation)
        size = self.batch or len(features)
        parts = (features[start : start + size] for start in range(0, len(features), size))
        self._seen[name] = [gram(part) for part in parts if len(part) >= LEAST]

    def take(self) -> list[Tensor]:
        """Of each mini-batch of the last batch, [units, n, n], the units in order."""
        seen, self._seen = self._seen, {}
        return [torch.stack(grams) for grams in zip(*(seen[name] for name in self.sites), strict=True)]


def flatten_state(anatomy: Anatomy, site: Site, activation: Tensor) -> Tensor:
    """[B, positions * channels], in whatever order needs no copy: a Gram matrix does not know it."""
    if not site.layout.spatial:
        return activation.flatten(1)
    maps_bchw = anatomy.grid(site, activation)
    channels_lie_together = maps_bchw.stride(1) == 1
    return (maps_bchw.permute(0, 2, 3, 1) if channels_lie_together else maps_bchw).flatten(1)


def _outer(one: Matrix, other: Matrix) -> Matrix:
    return one[:, None] * other[None, :]


def _stages(units: Sequence[Unit], parts: int | None) -> list[int | None]:
    """The stage of each unit on a grid; of a network that has only one, which of so many equal parts it is in."""
    stages = [unit.stage if unit.output.layout.spatial else None for unit in units]
    if parts is None or len({stage for stage in stages if stage is not None}) != 1:
        return stages
    count = sum(stage is not None for stage in stages)
    numbers = iter(range(count))
    return [None if stage is None else next(numbers) * parts // count for stage in stages]


def _block_weights(stages: Sequence[int | None]) -> Matrix:
    """[L, L] such that the sum of the weighted CKA is `block_structure`; None stands for a unit that does not count."""
    at = np.arange(len(stages))
    apart = np.abs(at[:, None] - at[None, :])
    counts = np.array([stage is not None for stage in stages])
    both = _outer(counts, counts)
    same = np.array([[one == other for other in stages] for one in stages])
    weights = np.zeros(apart.shape)
    compared = 0
    for distance in range(1, len(stages)):
        within, across = both & same & (apart == distance), both & ~same & (apart == distance)
        if within.any() and across.any():
            weights += within / within.sum() - across / across.sum()
            compared += 1
    return weights / max(compared, 1)


def block_structure(cka: Matrix, stages: Sequence[int]) -> float:
    """How much more alike units of one stage are than units of different stages that are as far apart in depth.

    The mean CKA of pairs within a stage less that of pairs across stages, at each distance in depth at which there are
    both, averaged over the distances. A similarity that only falls with distance has none, wherever it is cut; nor has
    a network of one stage.
    """
    return float((_block_weights(stages) * cka).sum())


@dataclass(frozen=True)
class Comparison:
    """CKA between the units of two networks."""

    cka: Matrix
    """[units of the first, units of the second]."""
    first: tuple[Unit, ...]
    second: tuple[Unit, ...]
    images: int
    """How many were used: those of batches with fewer than four were not."""


def cka_between(first: nn.Module, second: nn.Module, batches: Iterable[Tensor]) -> Comparison:
    """CKA between all units of two networks, each batch [n, C, H, W] of pixels being a mini-batch that both see once.

    Example:
        >>> batches = [torch.rand(16, 3, 224, 224) for _ in range(10)]  # doctest: +SKIP
        >>> cka_between(vit, resnet, batches).cka.shape  # doctest: +SKIP
        (27, 10)
    """
    networks = tuple(dict.fromkeys((first, second)))  # one, if it is compared with itself
    readers: list[_Grams] = []
    sums: HSICSums | None = None
    with ExitStack() as stack, torch.no_grad():
        for network in networks:
            stack.enter_context(preserve_state(network))
        for images in batches:
            if not isinstance(images, Tensor) or images.ndim != 4:
                raise DataError(
                    f"CKA needs batches of images [n, C, H, W], not {type(images).__name__}; of a loader with labels:"
                    " (images for images, _ in loader)."
                )
            if len(images) < LEAST:
                continue
            readers = readers or [_reader(network, images, stack) for network in networks]
            for network in networks:
                network(_where(network, images))
            grams = torch.cat([grams.double().cpu() for reader in readers for grams in reader.take()])
            sums = sums or HSICSums(len(grams))
            sums.add(grams)
    if sums is None:
        raise DataError(f"CKA needs batches of at least {LEAST} images.")
    ours, theirs = readers[0].anatomy.units, readers[-1].anatomy.units
    _check_finite(sums, [unit for reader in readers for unit in reader.anatomy.units])
    return Comparison(sums.cka()[: len(ours), -len(theirs) :], ours, theirs, int(sums.images.sum()))


def _reader(network: nn.Module, images: Tensor, stack: ExitStack) -> _Grams:
    reader = _Grams(Anatomy.of(network, images))
    stack.enter_context(stream(reader.sites, reader.read))
    return reader


def _where(network: nn.Module, images: Tensor) -> Tensor:
    """`images` where the network can take them."""
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    return images.to(like)


def _check_finite(sums: HSICSums, units: Sequence[Unit]) -> None:
    own = sums.hsic.sum(0).diagonal()
    for unit, value in zip(units, own, strict=True):
        if not np.isfinite(value):
            raise ModelError(f"the state after {unit.name} is not finite for some images, or too large for a product.")
