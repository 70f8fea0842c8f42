"""The module that is differentiated in training: network, task losses and the treatments' objectives."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from vitclinic.data import Batch
from vitclinic.tasks.task import Task
from vitclinic.treatments import Losses, Objective


class Learner(nn.Module):
    """A network with its task's losses and the treatments' objectives, as wrapped by DDP and trained."""

    def __init__(self, network: nn.Module, task: Task, objectives: Mapping[str, Objective]) -> None:
        super().__init__()
        self.network = network
        self.task = task
        self.objectives = nn.ModuleDict(dict(objectives))

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch by name: the task's own, then the objectives'."""
        outputs = self.network(batch.images)
        losses = self.task.losses(outputs, batch)
        for name, objective in self.objectives.items():
            losses[name] = objective(batch, outputs)
        return losses
