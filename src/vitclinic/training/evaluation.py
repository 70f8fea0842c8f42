"""Accuracy and loss on a split: exact for any batch size and any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vitclinic.anatomy import evaluating
from vitclinic.data import Dataset, evaluation_batches
from vitclinic.statistics import share_interval
from vitclinic.training.distributed import World

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
def evaluate(network: nn.Module, dataset: Dataset, split: str, world: World, batch_size: int = BATCH_SIZE) -> Score:
    """The score on a whole split, each process taking its share of the images."""
    parameter = next(network.parameters())
    top = min(5, len(dataset.classes))
    totals = torch.zeros(4, dtype=torch.float64)
    with evaluating(network):
        for batch in evaluation_batches(dataset, split, batch_size, world.rank, world.size):
            moved = batch.to(parameter.device, parameter.dtype)
            logits = network(moved.images)
            ranked = logits.topk(top, dim=1).indices
            hits = ranked == moved.targets[:, None]
            nll = F.cross_entropy(logits.double(), moved.targets, reduction="sum")
            parts = [torch.tensor(len(batch)), hits[:, 0].sum(), hits.sum(), nll]
            totals += torch.stack([part.double().cpu() for part in parts])
    count, correct, in_top, nll_sum = world.sum(totals.to(parameter.device)).tolist()
    return Score(int(count), int(correct), int(in_top), nll_sum / count)
