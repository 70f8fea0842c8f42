"""What the distances between embeddings say: nearest neighbours, retrieval, alignment and uniformity."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from vitclinic._core.neighbours import CHUNK, rank_leave_one_out
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour import mean_over, share
from vitclinic.probes.features.embeddings import (
    alignment,
    embed,
    embedding_bytes,
    knn_predict,
    labels_of,
    matching_curve,
    uniformity,
)
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_VOTE, _RANK, _PAIR = 4.3, 32.0, 24.0
"""Bytes for each pair of images, counted: of a vote and of a ranking (of at most `CHUNK` queries), of distances."""


@register
class KNN(OwningProbe):
    """Accuracy of a vote of the nearest training images, by their embeddings [Wu et al. 2018].

    Cosine similarity; a neighbour's vote weighs exp(similarity / temperature). The network needs no head.

    Example:
        >>> import timm, torch
        >>> from vitclinic.data import open_data
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=0)
        >>> KNN(images=50)(model, open_data("digits"), limit=20, split="test").scalars["accuracy"].n
        20
    """

    name = "knn"
    group = "Representation"
    rank = 290
    title = "Nearest neighbours"
    question = "Do images of one class lie together in the embedding?"
    paper = "Wu et al. 2018; Caron et al. 2021 (DINO)"
    key_scalars: ClassVar[KeyScalars] = {"accuracy": "higher"}
    asked_for = True
    by_default: ClassVar[bool] = False

    k: Annotated[int, Field(ge=1)] = Field(20, description="neighbours that vote")
    temperature: Annotated[float, Field(gt=0)] | None = Field(
        0.07, description="temperature of the votes; null: all count alike"
    )
    images: Annotated[int, Field(ge=1)] = Field(10_000, description="training images, at most")

    def check(self, subject: Subject) -> None:
        labels_of(subject)
        subject.on("train", strict=True)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) + len(subject.on("train", self.images, strict=True)))

    def peak_memory(self, subject: Subject) -> float:
        train = subject.on("train", self.images, strict=True)
        held = embedding_bytes(train) + embedding_bytes(subject)
        voting = 2 * held + _VOTE * len(train) * min(len(subject), CHUNK)
        return max(held + super().peak_memory(subject), voting)

    def measure(self, subject: Subject) -> Result:
        train = subject.on("train", self.images, strict=True)
        labels = labels_of(subject)
        found = knn_predict(embed(train), labels_of(train), embed(subject), self.k, self.temperature)
        return Result({"accuracy": share(int((found == labels).sum()), len(labels))})


@register
class Retrieval(OwningProbe):
    """Mean average precision and matching rates of images that are ranked by their embeddings, leave-one-out.

    Each image is a query and all others are the gallery; relevant are those of its class.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8) % 2)]
        >>> Retrieval()(model, loader).scalars["map"].n
        8
    """

    name = "retrieval"
    group = "Representation"
    rank = 300
    title = "Retrieval"
    question = "Are the nearest images of the same class?"
    paper = "Wang et al. 2022, Table 4"
    key_scalars: ClassVar[KeyScalars] = {"map": "higher", "rank1": "higher"}
    asked_for = True
    by_default: ClassVar[bool] = False

    ranks: Annotated[int, Field(ge=1)] = Field(20, description="length of the cumulative matching curve")

    def check(self, subject: Subject) -> None:
        if labels_of(subject).bincount().max() < 2:
            raise DoesNotApply("no two of the images are of one class.")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def peak_memory(self, subject: Subject) -> float:
        held, n = embedding_bytes(subject), len(subject)
        return held + max(held + super().peak_memory(subject), held + _RANK * n * min(n, CHUNK))

    def measure(self, subject: Subject) -> Result:
        ranking = rank_leave_one_out(embed(subject), labels_of(subject))
        scalars = {"map": mean_over(ranking.average_precision.double().numpy(), 0.0, 1.0)}
        for rank in (1, 5, 10):
            hits = int((ranking.first_rank <= rank).sum())
            scalars[f"rank{rank}"] = share(hits, len(ranking.first_rank))
        curve = matching_curve(ranking.first_rank, self.ranks)
        return Result(scalars, arrays={"cmc": curve.numpy().astype(np.float64)})


@register
class AlignmentUniformity(OwningProbe):
    """Closeness of images of one class, and spread of all images over the sphere of embeddings [Wang and Isola 2020].

    alignment = mean |x - y|^2 over pairs of one class; uniformity = log mean exp(-2 |x - y|^2) over all pairs.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8) % 2)]
        >>> AlignmentUniformity()(model, loader).scalars["uniformity"].value < 0
        True
    """

    name = "alignment_uniformity"
    group = "Representation"
    rank = 310
    title = "Alignment and uniformity"
    question = "Are classes tight, and is the whole sphere used?"
    paper = "Wang and Isola 2020"
    key_scalars: ClassVar[KeyScalars] = {"alignment": "lower", "uniformity": "lower"}
    asked_for = True
    by_default: ClassVar[bool] = False

    images: Annotated[int, Field(ge=2)] = Field(2000, description="images, at most; all pairs of them are compared")

    def check(self, subject: Subject) -> None:
        if labels_of(subject)[: self.images].bincount().max() < 2:
            raise DoesNotApply("no two of the images are of one class.")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def peak_memory(self, subject: Subject) -> float:
        held, n = embedding_bytes(subject), min(self.images, len(subject))
        return held + max(held + super().peak_memory(subject), _PAIR * n**2)

    def measure(self, subject: Subject) -> Result:
        x_nd, labels = embed(subject)[: self.images], labels_of(subject)[: self.images]
        scalars = {"alignment": alignment(x_nd, labels), "uniformity": uniformity(x_nd)}
        return Result({name: Scalar(value=value, n=len(x_nd)) for name, value in scalars.items()})
