"""A vote of the nearest training images, by their embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vitclinic._core.neighbours import CHUNK
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.features.embeddings import (
    embed,
    embedding_bytes,
    knn_predict,
    labels_of,
)
from vitclinic.probes.probe import OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_VOTE = 4.3
"""Bytes of a vote for each pair of images, counted; of at most `CHUNK` queries at a time."""


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
