"""Missing rate: how often the midpoint of two training images is classified as neither [chen2022 Table 6]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.data import Batch, Dataset, Split, evaluation_batches
from vitclinic.data.randomness import generator
from vitclinic.probes.behaviour.behaviour_probe import divide_images
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.behaviour.predictions import predict
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject


@register
class MissingRate(OwningProbe):
    """Share of midpoints of two training images that are classified as neither of the two [chen2022 Table 6].

    A prediction at (x_i + x_j) / 2 is a miss unless it is y_i or y_j [Zhang et al. 2018]. No image is in two pairs.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> MissingRate()(model, loader).scalars["missing_rate"].n  # pairs
        4
    """

    name = "missing_rate"
    group = "Behaviour"
    rank = 250
    title = "Missing rate"
    question = "Does it see both of two images that are mixed into one?"
    paper = "Chen et al. 2022, Table 6 (C6)"
    key_scalars: ClassVar[KeyScalars] = {"missing_rate": "lower"}
    figures = (
        FigureSpec(
            name="missing-rate",
            kind="scalars",
            values={
                "missing_rate": "all pairs",
                "missing_rate_different_classes": "two classes",
                "missing_rate_same_class": "one class",
            },
            axis="share of pairs missed",
            share=True,
            title="Misses halfway between training images",
            reading="A bar is the share of pairs of training images whose average is taken for a class that neither of"
            " them has, with its 95% interval. Shorter is more linear between the images; with few classes, look at the"
            " pairs of two classes.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"pairs": 256},)

    pairs: Annotated[int, Field(ge=1)] = Field(1024, description="maximum number of pairs of training images")

    def view(self, subject: Subject) -> Subject:
        return subject.on("train", 2 * self.pairs, strict=True)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) // 2)

    def measure(self, subject: Subject) -> Result:
        total = len(subject) // 2
        if not total:
            raise DoesNotApply("there is only one training image, so there are no pairs.")
        missed, different = np.zeros(total, np.bool_), np.zeros(total, np.bool_)

        def measure_batch(batches: tuple[Batch, Batch]) -> int:
            one, other = batches
            places = one.indices.numpy()
            found = predict(subject, midpoint(one.images, other.images))
            missed[places] = is_missed(found, one.targets, other.targets).cpu().numpy()
            different[places] = (one.targets != other.targets).cpu().numpy()
            return len(one)

        divide_images(subject, self.name, total, iterate_pairs(subject), measure_batch, (missed, different))
        scalars = {"missing_rate": share(int(missed.sum()), total)}
        for name, chosen in (("different_classes", different), ("same_class", ~different)):
            if chosen.any():
                scalars[f"missing_rate_{name}"] = share(int(missed[chosen].sum()), int(chosen.sum()))
        return Result(scalars)


def midpoint(one: Tensor, other: Tensor) -> Tensor:
    """Return the images halfway between two batches, (x_i + x_j) / 2."""
    return (one + other) / 2


def is_missed(predicted: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return whether each prediction [B] is neither of two labels [B]."""
    return (predicted != one) & (predicted != other)


def draw_pairs(images: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw random pairs of images, no image twice; one is left over if their number is odd."""
    order = generator("missing_rate", seed).permutation(images)
    half = images // 2
    return order[:half], order[half : 2 * half]


def iterate_pairs(subject: Subject) -> Iterator[tuple[Batch, Batch]]:
    """Yield this process's share of pairs, as batches of first and of second images."""
    halves = [_part(subject.dataset, subject.images, rows) for rows in draw_pairs(len(subject), subject.seed)]
    part, parts = subject.distributed.rank, subject.distributed.size
    one, other = (evaluation_batches(half, "train", subject.batch_size, part, parts) for half in halves)
    for a, b in zip(one, other, strict=True):
        yield a.to(subject.device, subject.dtype), b.to(subject.device, subject.dtype)


def _part(dataset: Dataset, images: Split, rows: NDArray[np.int64]) -> Dataset:
    return replace(dataset, splits={"train": Split(images.images, images.rows[rows], images.labels[rows])})
