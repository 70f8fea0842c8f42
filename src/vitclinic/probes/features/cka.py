"""Similarity of a network's layers: mini-batch linear CKA of the states after its units [park2022 Fig. 10a, D.3]."""

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
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import jackknife_half_width
from vitclinic.anatomy import Anatomy, Site, Unit, stream
from vitclinic.data import Batch
from vitclinic.probes.features.hsic import LEAST, HSICSums, Matrix, gram
from vitclinic.probes.guards import preserve_state
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Tally, register, unit_row
from vitclinic.probes.subject import Subject


@register
class CKA(StreamingProbe):
    """Mini-batch linear CKA between the states after all pairs of units [park2022 Fig. 10a, D.3].

    CKA(i, j) = HSIC(i, j) / sqrt(HSIC(i, i) HSIC(j, j)), where each HSIC is the unbiased estimate of a mini-batch,
    averaged over mini-batches before the ratio (Nguyen et al. 2021). Features are the positions and channels of a
    state, without prefix tokens.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> CKA()(model, loader).arrays["cka"].shape  # stem, position embedding, 12 x (MSA, MLP), head
        (27, 27)
    """

    name = "cka"
    group = "Representation"
    rank = 60
    title = "Similarity of layers (CKA)"
    question = "Which layers represent images alike?"
    paper = "Park and Kim 2022, Fig. 10a, D.3 (P9)"
    key_scalars: ClassVar[KeyScalars] = {"cka_mean": None, "block_structure": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    batch: Annotated[int, Field(ge=LEAST)] = Field(64, description="images per mini-batch, at most those of a batch")

    parts: Annotated[int, Field(ge=2)] | None = Field(
        None, description="cut a single-stage network into this many equal parts, as a control for block_structure"
    )

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the batch size if it matters: mini-batches are cut from batches that `batch` may not divide."""
        size, processes = subject.batch_size, subject.distributed.size
        if processes > 1:
            return {"batch_size": size, "processes": processes}
        return {} if size % self.batch == 0 or size >= len(subject) else {"batch_size": size}

    def begin(self, subject: Subject) -> Tally:
        at_once = min(self.batch, subject.batch_size, len(subject))
        if at_once < LEAST:
            raise DoesNotApply(f"CKA needs mini-batches of at least {LEAST} images, but here they have {at_once}.")
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
            raise DoesNotApply(f"CKA needs mini-batches of at least {LEAST} images, but all of them are smaller.")
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
    """CKA with jackknife intervals over groups of mini-batches."""

    def __init__(self, sums: HSICSums) -> None:
        self.cka = sums.cka()
        self.images = int(sums.images.sum())
        self._without_each = sums.without_each()

    def weighted_sum(self, weights: Matrix) -> Scalar:
        """Return the weighted sum of the CKA matrix, with a jackknife interval over mini-batches."""
        value = float((weights * self.cka).sum())
        if not len(self._without_each):
            return Scalar(value=value, n=self.images)
        half = float(jackknife_half_width((weights * self._without_each).sum((1, 2))))
        bound = float(np.abs(weights).sum())  # |CKA| is at most 1 by definition
        low, high = max(value - half, -bound), min(value + half, bound)
        return Scalar(value=value, low=min(low, value), high=max(high, value), n=self.images)


class _Grams:
    """Gram matrices of the states after all units, for the mini-batches of the current batch.

    A mini-batch has at most `batch` images; None makes it the whole batch.
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
        """Return and forget the Gram matrices of the last batch, [units, n, n] for each mini-batch."""
        seen, self._seen = self._seen, {}
        return [torch.stack(grams) for grams in zip(*(seen[name] for name in self.sites), strict=True)]


def flatten_state(anatomy: Anatomy, site: Site, activation: Tensor) -> Tensor:
    """Return a state as [B, positions * channels], in whichever order needs no copy (Gram matrices are the same)."""
    if not site.layout.spatial:
        return activation.flatten(1)
    maps_bchw = anatomy.grid(site, activation)
    channels_lie_together = maps_bchw.stride(1) == 1
    return (maps_bchw.permute(0, 2, 3, 1) if channels_lie_together else maps_bchw).flatten(1)


def _outer(one: Matrix, other: Matrix) -> Matrix:
    return one[:, None] * other[None, :]


def _stages(units: Sequence[Unit], parts: int | None) -> list[int | None]:
    """Return the stage of each unit on a grid (None for the others); `parts` cuts a single-stage network into parts."""
    stages = [unit.stage if unit.output.layout.spatial else None for unit in units]
    if parts is None or len({stage for stage in stages if stage is not None}) != 1:
        return stages
    count = sum(stage is not None for stage in stages)
    numbers = iter(range(count))
    return [None if stage is None else next(numbers) * parts // count for stage in stages]


def _block_weights(stages: Sequence[int | None]) -> Matrix:
    """Return the weights [L, L] with which CKA sums up to `block_structure`; units of stage None do not count."""
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
    """Return how much more similar units of one stage are than units of different stages at the same distance in depth.

    It is the mean CKA of pairs within a stage minus that of pairs across stages, at each distance in depth at which
    both exist, averaged over distances. It is 0 for a similarity that only falls with distance, wherever stages are
    cut, and for a network of one stage.

    Args:
        cka: CKA matrix, [L, L].
        stages: Stage of each of the L units.

    Example:
        >>> block_structure(np.kron(np.eye(2), np.ones((3, 3))), [0, 0, 0, 1, 1, 1])
        1.0
    """
    return float((_block_weights(stages) * cka).sum())


@dataclass(frozen=True)
class CrossCKA:
    """CKA between the units of two networks."""

    cka: Matrix
    """[units of the first network, units of the second]."""
    first: tuple[Unit, ...]
    second: tuple[Unit, ...]
    images: int
    """Number of images used; batches of fewer than four are skipped."""


def cka_between(first: nn.Module, second: nn.Module, batches: Iterable[Tensor]) -> CrossCKA:
    """Return CKA between all units of two networks, in one pass of both over the same images.

    Args:
        first: A network.
        second: Another network (or the same).
        batches: Batches of pixels [n, C, H, W]; each batch is a mini-batch, and those of fewer than four are skipped.

    Raises:
        DataError: If the batches are not images, or all of them are too small.

    Example:
        >>> import timm
        >>> deep, shallow = (timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth) for depth in (4, 2))
        >>> cka_between(deep, shallow, [torch.rand(8, 3, 32, 32)]).cka.shape
        (11, 7)
    """
    networks = tuple(dict.fromkeys((first, second)))  # one if a network is compared with itself
    readers: list[_Grams] = []
    sums: HSICSums | None = None
    with ExitStack() as stack, torch.no_grad():
        for network in networks:
            stack.enter_context(preserve_state(network))
        for images in batches:
            if not isinstance(images, Tensor) or images.ndim != 4:
                raise DataError(
                    f"CKA needs batches of images [n, C, H, W] (got {type(images).__name__}). If your loader yields"
                    " labels, too, pass (images for images, _ in loader)."
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
    return CrossCKA(sums.cka()[: len(ours), -len(theirs) :], ours, theirs, int(sums.images.sum()))


def _reader(network: nn.Module, images: Tensor, stack: ExitStack) -> _Grams:
    reader = _Grams(Anatomy.of(network, images))
    stack.enter_context(stream(reader.sites, reader.read))
    return reader


def _where(network: nn.Module, images: Tensor) -> Tensor:
    """Move images to the device and dtype of a network."""
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    return images.to(like)


def _check_finite(sums: HSICSums, units: Sequence[Unit]) -> None:
    own = sums.hsic.sum(0).diagonal()
    for unit, value in zip(units, own, strict=True):
        if not np.isfinite(value):
            raise ModelError(f"the state after {unit.name} is not finite for some image, or too large to multiply.")
