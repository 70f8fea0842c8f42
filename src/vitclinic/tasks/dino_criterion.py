"""DINO's criterion: a student that predicts the outputs of its own moving average, the teacher, for other crops.

The teacher sees the global crops once a step, before all passes, so that SAM's second pass and accumulation share its
outputs, and the centre (or Sinkhorn's scaling) is that of the whole batch, however it is divided.
Shapes: B images, V views, G of them global, K outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.errors import ModelError
from vitclinic.data import Batch, ImageSpec
from vitclinic.tasks.criterion import Criterion, Moment, count_features, total_of_processes
from vitclinic.tasks.losses import centre_outputs, dino_loss, sinkhorn

if TYPE_CHECKING:
    from vitclinic.tasks.dino import Dino
    from vitclinic.treatments import Losses

GLOBAL_CROPS = 2


class DinoHead(nn.Module):
    """DINO's projection head: a perceptron with three layers, scaled to length 1, then cosines with K prototypes."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        self.prototypes = nn.Linear(bottleneck, outputs, bias=False)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        """Return the outputs [B, K]; `frozen` keeps the prototypes as they are, with a gradient of zero."""
        weight = F.normalize(self.prototypes.weight, dim=1)
        if frozen:
            weight = weight.detach() + 0 * weight
        return F.linear(F.normalize(self.layers(x), dim=1), weight)


class DinoCriterion(Criterion):
    """Student's head, teacher with its head, and centre.

    Args:
        task: The options.
        network: The student, without a head.
        spec: The images at full size.
        local_size: Height and width of local crops; None if there are none.
    """

    centre: Tensor

    def __init__(self, task: Dino, network: nn.Module, spec: ImageSpec, local_size: tuple[int, int] | None) -> None:
        super().__init__()
        self.task = task
        width = count_features(network, spec)
        if local_size is not None:
            try:
                count_features(network, spec, local_size)
            except ModelError as error:
                raise ModelError(
                    f"The local crops of the task dino are smaller than the images. {error} Set task.local_crops=0."
                ) from error
        parameter = next(network.parameters())
        head = DinoHead(width, task.hidden, task.bottleneck, task.outputs)
        self.head = head.to(parameter.device, parameter.dtype)
        self.teacher = copy.deepcopy(network).requires_grad_(False).eval()
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False).eval()
        self.register_buffer("centre", torch.zeros(task.outputs, dtype=parameter.dtype, device=parameter.device))
        self.moment = Moment(0, 1)
        self.batch_mean: Tensor | None = None
        self.entropies = torch.zeros(2)

    def train(self, mode: bool = True) -> DinoCriterion:
        """Set the mode of the student's head; the teacher always evaluates."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    @torch.no_grad()
    def prepare(self, network: nn.Module, batches: Sequence[Batch], moment: Moment, divided: bool) -> list[Batch]:
        self.moment = moment
        outputs = [self._teach(batch) for batch in batches]  # [G, B, K] each
        together = torch.cat(outputs, dim=1)
        temperature = self.task.teacher_temperature_at(moment.progress)
        if self.task.centring == "sinkhorn":
            targets = sinkhorn(together.flatten(0, 1), temperature, total=total_of_processes).view_as(together)
        else:
            targets = centre_outputs(together, self.centre, temperature)
        self._note(together, targets)
        parts = torch.split(targets, [len(batch) for batch in batches], dim=1)
        return [replace(batch, teacher=part.transpose(0, 1)) for batch, part in zip(batches, parts, strict=True)]

    def _teach(self, batch: Batch) -> Tensor:
        """Return the teacher's outputs for the global crops, [G, B, K]."""
        views = torch.cat([batch.images, *batch.crops[: GLOBAL_CROPS - 1]])
        outputs: Tensor = self.teacher_head(self.teacher(views))
        return outputs.view(GLOBAL_CROPS, len(batch), -1).to(self.centre.dtype)

    def _note(self, outputs_gbk: Tensor, targets_gbk: Tensor) -> None:
        """Keep the means over the batch of all processes: of outputs, for the centre, of targets and their entropy."""
        count, size = outputs_gbk[..., 0].numel(), outputs_gbk.shape[-1]
        sums = [outputs_gbk.sum((0, 1)), targets_gbk.sum((0, 1)), _entropy(targets_gbk).sum().view(1)]
        whole = total_of_processes(torch.cat([*sums, sums[0].new_tensor([count])]))
        means = whole / whole[-1]
        self.batch_mean, mean_target = means[:size], means[size : 2 * size]
        most = math.log(size)
        self.entropies = torch.stack([means[2 * size], _entropy(mean_target)]) / most

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        assert batch.teacher is not None  # by `prepare`
        views = [batch.images, *batch.crops]
        frozen = self.moment.progress < self.task.freeze_prototypes
        features = network(torch.cat(views[:GLOBAL_CROPS]))
        outputs = self.head(features, frozen).chunk(GLOBAL_CROPS)
        if views[GLOBAL_CROPS:]:
            local = self.head(network(torch.cat(views[GLOBAL_CROPS:])), frozen)
            outputs = [*outputs, *local.chunk(len(views) - GLOBAL_CROPS)]
        student = torch.stack(list(outputs))
        loss = dino_loss(batch.teacher.transpose(0, 1), student, self.task.student_temperature)
        return features[: len(batch)], {"dino": loss}

    @torch.no_grad()
    def finish(self, network: nn.Module) -> None:
        momentum = self.task.momentum_at(self.moment.progress)
        pairs = [(self.teacher, network), (self.teacher_head, self.head)]
        for teacher, student in pairs:
            averaged: list[Tensor] = [*teacher.parameters()]
            torch._foreach_lerp_(averaged, [*student.parameters()], 1 - momentum)
            kept = dict(teacher.named_buffers())
            for name, buffer in student.named_buffers():  # a treatment may keep masks that only one of them has made
                if name in kept and kept[name].shape == buffer.shape:
                    kept[name].copy_(buffer)
        if self.batch_mean is not None and self.task.centring == "centre":
            self.centre.lerp_(self.batch_mean, 1 - self.task.centre_momentum)

    def facts(self) -> dict[str, float]:
        """Return schedules, and entropies of the teacher's targets: of each image and of their mean, 1 if uniform."""
        progress = self.moment.progress
        each, mean = self.entropies.tolist()
        return {
            "teacher_entropy": each,
            "mean_entropy": mean,
            "teacher_temperature": self.task.teacher_temperature_at(progress),
            "momentum": self.task.momentum_at(progress),
        }

    def exported(self, network: nn.Module) -> nn.Module:
        return self.teacher


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)
