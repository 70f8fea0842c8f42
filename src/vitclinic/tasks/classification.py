"""Image classification with softmax or sigmoid cross-entropy.

torch is imported inside the functions: recipes import their task, and a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from vitclinic._core.config import Settings
from vitclinic.tasks.task import Metric, Score, Task, register

if TYPE_CHECKING:
    from torch import Tensor

    from vitclinic.data import Batch, ImageSpec
    from vitclinic.treatments import Losses


class LossConfig(Settings):
    """`loss` of a recipe. Label smoothing is part of the targets: see `data.augment.smoothing`."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["softmax", "sigmoid"] = "softmax"


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the softmax cross-entropy with class indices [B] or soft targets [B, K], averaged over images."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, targets)


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of every class, summed over classes, averaged over images [chen2022 App. E.1]."""
    import torch.nn.functional as F

    logits = logits.float() if logits.dtype.itemsize < 4 else logits
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

    def num_outputs(self, spec: ImageSpec) -> int:
        return spec.num_classes

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        loss = sigmoid_loss if self.loss.name == "sigmoid" else softmax_loss
        return {"task": loss(outputs, batch.targets)}

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
