"""Retrieval: images that are ranked by their embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from vitclinic._core.neighbours import CHUNK, rank_leave_one_out
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour.intervals import mean_over, share
from vitclinic.probes.features.embeddings import (
    embed,
    embedding_bytes,
    labels_of,
    matching_curve,
)
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_RANK = 32.0
"""Bytes of a ranking for each pair of images, counted; of at most `CHUNK` queries at a time."""


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
            raise DoesNotApply("no two images have the same class.")

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
