"""Image classification with softmax or sigmoid cross-entropy.

torch is imported inside the functions: recipes import their task, and a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from vitclinic._core.config import Settings
from vitclinic._core.precision import upcast
from vitclinic.tasks.task import Metric, Score, Task, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic.data import Augment, Batch, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Losses


class TokenLabelConfig(Settings):
    """`token_labels` of the task classification: soft labels of patches, from a teacher or a file."""

    main_key: ClassVar[str | None] = "source"

    source: Annotated[str, Field(min_length=1)] = Field(
        description="the teacher: RUN[@CHECKPOINT], timm:NAME; or a safetensors file of labels"
    )
    weight: Annotated[float, Field(gt=0)] = Field(0.5, description="weight of the patches' loss")
    class_targets: Literal["labels", "teacher", "blend"] = Field(
        "labels", description="what whole images are learned from: the data's labels, the teacher's, or both"
    )
    top: Annotated[int, Field(ge=1)] = Field(5, description="how many classes of a cell a teacher's labels are kept of")
    digest: str | None = Field(None, description="SHA-256 of the teacher or the file; noted when the run starts")


class LossConfig(Settings):
    """`loss` of a recipe. Label smoothing is part of the targets: see `data.augment.smoothing`."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["softmax", "sigmoid"] = "softmax"


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the softmax cross-entropy with class indices [B] or soft targets [B, K], averaged over images."""
    import torch.nn.functional as F

    return F.cross_entropy(upcast(logits), targets)


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of every class, summed over classes, averaged over images [chen2022 App. E.1]."""
    import torch.nn.functional as F

    logits = upcast(logits)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum") / len(logits)


@register
class Classification(Task):
    """Image classification into one of K classes.

    Scores have `accuracy` with its 95% interval, `accuracy_top5`, `nll` (the mean softmax cross-entropy, whatever the
    training loss), `correct` and `count`.

    Attributes:
        loss: `softmax` or `sigmoid`; set by the recipe's `loss`.
        token_labels: Soft labels of patches, learned besides [Jiang et al. 2021; wang2022 Table 2].

    Example:
        >>> import torch
        >>> from vitclinic.data import Batch
        >>> labels = torch.tensor([0, 1])
        >>> batch = Batch(torch.zeros(2, 1, 8, 8), labels, torch.arange(2), torch.arange(2))
        >>> task = Classification()
        >>> sums = task.measure(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), batch)
        >>> task.summarize(sums.tolist())["accuracy"]
        0.5
    """

    name = "classification"
    title = "image classification"
    metrics = (
        Metric("accuracy", share=True, interval=True),
        Metric("accuracy_top5", share=True, headline=False),
        Metric("nll"),
    )
    selects = "accuracy"
    loss_metric = "nll"

    loss: LossConfig = Field(LossConfig(), description="softmax or sigmoid; a recipe's `loss`")
    token_labels: TokenLabelConfig | None = Field(
        None, description="soft labels of patches, from a teacher or a file, learned besides the labels of images"
    )

    def check(self, recipe: Recipe) -> None:
        """Refuse what token labels cannot follow, or what gives patches other targets."""
        if self.token_labels is None:
            return
        if recipe.progressive_resizing.shares:
            raise ValueError("task.token_labels have the grid of the full images: remove progressive_resizing")
        if recipe.compile:
            raise ValueError("compile is not for task.token_labels: remove it")
        for treatment in recipe.treatments:
            if treatment.name == "patch_diversity" and treatment.model_dump()["mixing"]:
                raise ValueError(
                    "the mixing loss of patch_diversity and task.token_labels both give patches their targets: set"
                    " the treatment's mixing to 0, or remove one of the two"
                )

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.data import TrainingStream
        from vitclinic.data.token_labels import TokenLabels

        if self.token_labels is None:
            return TrainingStream(dataset, augment, seed)
        from vitclinic.tasks.token_labels import find_patches

        assert dataset.train.label_maps is not None  # by `training.token_label_teacher`
        grid = find_patches(network, dataset.spec).grid
        labels = TokenLabels(dataset.train.label_maps, grid, self.token_labels.class_targets)
        return TrainingStream(dataset, augment, seed, token_labels=labels)

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion | None:
        if self.token_labels is None:
            return None
        from vitclinic.tasks.token_labels import TokenLabelCriterion

        return TokenLabelCriterion(self, self.token_labels.weight, network, spec)

    def num_outputs(self, spec: ImageSpec) -> int:
        return spec.num_classes

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        return {"task": self.loss_of(outputs, batch.targets)}

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of class scores [B, K] with class indices [B] or soft targets [B, K]."""
        return sigmoid_loss(logits, targets) if self.loss.name == "sigmoid" else softmax_loss(logits, targets)

    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch
        import torch.nn.functional as F

        ranked = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        hits = ranked == batch.targets[:, None]
        nll = F.cross_entropy(outputs.double(), batch.targets, reduction="sum")
        count = torch.tensor(len(batch), device=nll.device)
        return torch.stack([part.double() for part in (count, hits[:, 0].sum(), hits.sum(), nll)])

    def summarize(self, sums: list[float]) -> Score:
        from vitclinic._core.statistics import share_interval

        count, correct, in_top_5, nll = sums
        low, high = share_interval(int(correct), int(count))
        return {
            "accuracy": correct / count,
            "accuracy_low": low,
            "accuracy_high": high,
            "accuracy_top5": in_top_5 / count,
            "nll": nll / count,
            "correct": int(correct),
            "count": int(count),
        }
