"""Bases of the tasks that learn features without a classifier, and of those scored by nearest neighbours.

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from vitclinic.tasks.task import BATCH_SIZE, Metric, Score, Task, refuse_parts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Batch, Dataset, ImageSpec
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Losses

_LABELS = ("mixup", "cutmix", "smoothing")
"""Parts of the augmentation that make targets."""


COLLAPSED = 1.2
"""Effective rank below which features are said to have collapsed."""


class Representation(Task):
    """Base of tasks whose network has no head: it returns features. Scores have `rank`, their effective rank."""

    learns_from: ClassVar[str] = "several views of an image"
    """What it learns from, for messages."""
    several_views: ClassVar[bool] = True

    def num_outputs(self, spec: ImageSpec) -> int:
        return 0

    def check(self, recipe: Recipe) -> None:
        """Refuse what would be meaningless without class scores, or with several views of an image."""
        refuse_parts(self, recipe, _LABELS)
        if recipe.progressive_resizing.shares and self.several_views:
            raise ValueError(f"the task {self.name} learns from {self.learns_from}: remove progressive_resizing")
        for treatment in recipe.treatments:
            if treatment.input_ascent() is not None:
                raise ValueError(
                    f"the treatment {treatment.name} perturbs images one by one, and the task {self.name} learns from"
                    f" {self.learns_from}: remove one of the two"
                )

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        raise TypeError(f"The losses of the task {self.name} are those of its criterion.")

    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        raise TypeError(f"The metrics of the task {self.name} cannot be averaged over images; use evaluate().")

    def summarize(self, sums: list[float]) -> Score:
        raise TypeError(f"The metrics of the task {self.name} cannot be averaged over images; use evaluate().")

    def find_failure(self, row: Mapping[str, Any], progress: float) -> str | None:
        if row["kind"] == "train" or not row["rank"] < COLLAPSED:  # a rank that is not a number is a divergence
            return None
        return (
            f"the features have collapsed: those of {row['count']:,} {row['kind']} images vary along"
            f" {row['rank']:.2f} directions (effective rank)"
        )


class NearestNeighbours(Representation):
    """Base of tasks that are scored by the nearest neighbours of an image among the training images.

    Scores have `knn_accuracy` with its 95% interval, `knn_nll` (of the shares of the neighbours' votes, mixed with one
    hundredth of a uniform guess), and `rank`.
    """

    metrics = (
        Metric("knn_accuracy", share=True, interval=True),
        Metric("rank"),
        Metric("knn_nll", headline=False),
    )
    selects = "knn_accuracy"
    loss_metric = "knn_nll"

    knn: Annotated[int, Field(ge=1)] = Field(20, description="neighbours that vote on a validation image")
    knn_images: Annotated[int, Field(ge=1)] = Field(
        5000, description="training images, at most, among which neighbours are looked for"
    )

    def evaluation_images(self, counts: Mapping[str, int], split: str) -> int:
        return counts[split] + min(self.knn_images, counts["train"])

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        import torch

        from vitclinic._core.neighbours import effective_rank, knn_votes
        from vitclinic._core.statistics import share_interval

        bank, known = collect_features(network, limit_train(dataset, self.knn_images), "train", distributed, batch_size)
        features, labels = collect_features(network, dataset, split, distributed, batch_size)
        votes = knn_votes(bank, known, features, len(dataset.classes), self.knn).double()
        count, correct = len(labels), int((votes.argmax(1) == labels).sum())
        low, high = share_interval(correct, count)
        guess = 0.99 * votes + 0.01 / votes.shape[1]
        return {
            "knn_accuracy": correct / count,
            "knn_accuracy_low": low,
            "knn_accuracy_high": high,
            "knn_nll": float(-guess[torch.arange(count), labels].log().mean()),
            "rank": effective_rank(features),
            "correct": correct,
            "count": count,
        }


def limit_train(dataset: Dataset, count: int) -> Dataset:
    """Return the data with at most `count` training images, in the proportions of their classes."""
    from vitclinic.data.source import subset

    train = dataset.train
    if count >= len(train):
        return dataset
    part = train.take(subset(train.labels, count, seed=0))
    return replace(dataset, splits={**dataset.splits, "train": part})


def collect_features(
    network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
) -> tuple[Tensor, Tensor]:
    """Return the features [N, D] of all images of a split, on the CPU, and their labels, in all processes."""
    import torch

    from vitclinic.anatomy import eval_mode
    from vitclinic.data import evaluation_batches

    parameter = next(network.parameters())

    def own() -> tuple[list[Tensor], list[Tensor]]:
        features, labels = [], []
        for batch in evaluation_batches(dataset, split, batch_size, distributed.rank, distributed.size):
            features.append(network(batch.to(parameter.device, parameter.dtype).images).cpu())
            labels.append(batch.targets)
        return features, labels

    with torch.no_grad(), eval_mode(network):
        found = distributed.gather(own)
    features, labels = ([part for of_process in found for part in of_process[which]] for which in (0, 1))
    return torch.cat(features), torch.cat(labels)
