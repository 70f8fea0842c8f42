"""Alignment and uniformity of embeddings on the sphere."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.features.embeddings import (
    alignment,
    embed,
    embedding_bytes,
    labels_of,
    uniformity,
)
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_PAIR = 24.0
"""Bytes of the distances for each pair of images, counted."""


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
            raise DoesNotApply("no two images have the same class.")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def peak_memory(self, subject: Subject) -> float:
        held, n = embedding_bytes(subject), min(self.images, len(subject))
        return held + max(held + super().peak_memory(subject), _PAIR * n**2)

    def measure(self, subject: Subject) -> Result:
        x_nd, labels = embed(subject)[: self.images], labels_of(subject)[: self.images]
        scalars = {"alignment": alignment(x_nd, labels), "uniformity": uniformity(x_nd)}
        return Result({name: Scalar(value=value, n=len(x_nd)) for name, value in scalars.items()})
