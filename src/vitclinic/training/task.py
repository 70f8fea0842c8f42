"""What a training step computes: one module from a batch to named losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic.config import Config
from vitclinic.data import Batch
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
