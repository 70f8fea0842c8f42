"""What a training step computes: one module from a batch to named losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.config import Config
from vitclinic._core.distributed import Distributed
from vitclinic._core.statistics import share_interval
from vitclinic.anatomy import evaluating
from vitclinic.data import Batch, Dataset, evaluation_batches
from vitclinic.treatments import Losses, Objective


class LossConfig(Config):
    """`loss` of a recipe. Label smoothing belongs to the targets: see `data.augment.smoothing`."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["softmax", "sigmoid"] = "softmax"


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with class indices [B] or shares of the classes [B, K], averaged over images."""
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, targets)


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of every class, summed over classes, averaged over images [chen2022 App. E.1]."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum") / len(logits)


class Task(nn.Module):
    """The network with its loss and the treatments' objectives: what DDP wraps and the optimizer trains."""

    def __init__(self, network: nn.Module, loss: LossConfig, objectives: Mapping[str, Objective]) -> None:
        super().__init__()
        self.network = network
        self.objectives = nn.ModuleDict(dict(objectives))
        self.loss = sigmoid_loss if loss.name == "sigmoid" else softmax_loss

    def forward(self, batch: Batch) -> Losses:
        logits = self.network(batch.images)
        losses = {"task": self.loss(logits, batch.targets)}
        for name, objective in self.objectives.items():
            losses[name] = objective(batch, logits)
        return losses


BATCH_SIZE = 256


@dataclass(frozen=True)
class Score:
    """How a network does on `count` images."""

    count: int
    correct: int
    correct_in_5: int
    nll: float
    """Mean softmax cross-entropy, whatever loss was trained with."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    def plain(self) -> dict[str, Any]:
        low, high = share_interval(self.correct, self.count)
        return {
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "accuracy_top5": self.correct_in_5 / self.count,
            "nll": self.nll,
            "correct": self.correct,
            "count": self.count,
        }


@torch.no_grad()
def evaluate(
    network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
) -> Score:
    """The score on a whole split, each process taking its share of the images."""
    own = evaluation_batches(dataset, split, batch_size, distributed.rank, distributed.size)
    with evaluating(network):
        totals = distributed.sum(lambda: _sum_scores(network, own, top=min(5, len(dataset.classes))))
    count, correct, in_top, nll_sum = totals.tolist()
    return Score(int(count), int(correct), int(in_top), nll_sum / count)


def _sum_scores(network: nn.Module, batches: Iterable[Batch], top: int) -> Tensor:
    """Return images, hits, hits among the `top` and summed NLL."""
    parameter = next(network.parameters())
    totals = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        moved = batch.to(parameter.device, parameter.dtype)
        logits = network(moved.images)
        ranked = logits.topk(top, dim=1).indices
        hits = ranked == moved.targets[:, None]
        nll = F.cross_entropy(logits.double(), moved.targets, reduction="sum")
        parts = [torch.tensor(len(batch)), hits[:, 0].sum(), hits.sum(), nll]
        totals += torch.stack([part.double().cpu() for part in parts])
    return totals.to(parameter.device)
