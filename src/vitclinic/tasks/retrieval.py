"""Retrieval and re-identification: identity and batch-hard triplet losses [wang2022 Table 4].

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from vitclinic.tasks.representation import Representation, collect_features
from vitclinic.tasks.task import BATCH_SIZE, Metric, Score, register

if TYPE_CHECKING:
    from torch import nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Augment, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.training.recipe import Recipe

Weight = Annotated[float, Field(ge=0)]


@register
class Retrieval(Representation):
    """Features by which other images of the same identity are found: identity loss and batch-hard triplets.

    Every image of a split, or each of its queries in its gallery, looks for the others of its class, by cosine, leaving
    out itself and, with `data.group`, those of its class and its own group, such as its camera. Scores have `map`,
    `rank1`, `rank5`, `rank10` (points of the CMC curve: the share of queries with a match among the first), `miss`
    (1 - map), `rank`, and `count`, the number of queries that have a match.

    Attributes:
        instances: Images K of an identity in a batch.
        margin: Margin of the triplets; None for the soft margin, log(1 + exp(x)).
        identity: Weight of the identity loss.
        triplet: Weight of the triplet loss.
        rerank: Score rankings by k-reciprocal neighbours instead of the cosine alone.
    """

    name = "retrieval"
    title = "retrieval"
    paper = "wang2022 Table 4"
    metrics = (
        Metric("map", share=True),
        Metric("rank1", share=True),
        Metric("rank5", share=True, headline=False),
        Metric("rank10", share=True, headline=False),
        Metric("rank", headline=False),
    )
    selects = "map"
    loss_metric = "miss"
    learns_from: ClassVar[str] = "comparisons of images"
    several_views: ClassVar[bool] = False

    instances: Annotated[int, Field(ge=2)] = Field(4, description="images of an identity in a batch")
    margin: Weight | None = Field(0.3, description="margin of the triplets; null for the soft margin")
    identity: Weight = Field(1.0, description="weight of the identity loss")
    triplet: Weight = Field(1.0, description="weight of the triplet loss")
    rerank: bool = Field(False, description="score rankings by k-reciprocal neighbours instead of the cosine alone")

    def check(self, recipe: Recipe) -> None:
        """Refuse batches that the groups of an identity do not divide, besides what all such tasks refuse."""
        super().check(recipe)
        if recipe.batch_size % self.instances:
            raise ValueError(
                f"batch_size {recipe.batch_size} is not a multiple of task.instances {self.instances}: a batch has"
                " that many images of each identity"
            )
        if (recipe.data.augment.resolve().repeats or 1) > 1:
            raise ValueError("the task retrieval orders its images by identity: remove data.augment.repeats")

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.data import TrainingStream
        from vitclinic.data.randomness import IdentityOrder

        stream = TrainingStream(dataset, augment, seed)
        stream.order = IdentityOrder(dataset.train.labels, seed, self.instances)
        return stream

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion:
        from vitclinic.tasks.pairwise_losses import RetrievalCriterion

        return RetrievalCriterion(self, network, spec)

    def evaluation_images(self, counts: Mapping[str, int], split: str) -> int:
        return counts[split]

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        import torch

        from vitclinic._core.neighbours import effective_rank, rank_leave_one_out

        features, labels = collect_features(network, dataset, split, distributed, batch_size)
        known = dataset.splits[split].groups, dataset.splits[split].queries
        cameras, queries = (None if column is None else torch.from_numpy(column) for column in known)
        precision, rank = rank_leave_one_out(features, labels, cameras, self.rerank, queries)
        mean = float(precision.mean()) if bool(features.isfinite().all()) else float("nan")
        return {
            "map": mean,
            "rank1": float((rank <= 1).double().mean()),
            "rank5": float((rank <= 5).double().mean()),
            "rank10": float((rank <= 10).double().mean()),
            "miss": 1 - mean,
            "rank": effective_rank(features),
            "count": len(rank),
        }
