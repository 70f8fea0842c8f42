"""Criteria that compare every image of a step with all others, wherever they are: contrastive, and triplets.

The loss L(z_1, ..., z_P) is one of all features of a step. A pass sees a part p of the images: it computes z_p with a
gradient and takes the others as constants, at the weights before the step. Then

    dL/dw = sum_p dL/dz_p dz_p/dw

so that the mean over parts of P dL/dz_p dz_p/dw is exactly the gradient of the whole batch, however it is divided among
processes, micro-batches and SAM's groups of m images, each of which climbs on its own images alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vitclinic._core.distributed import Distributed
from vitclinic.data import Batch, ImageSpec
from vitclinic.tasks.classification import softmax_loss
from vitclinic.tasks.criterion import Criterion, Moment, count_features
from vitclinic.tasks.losses import supervised_contrastive_loss, triplet_loss
from vitclinic.treatments.sam_core import keep_buffers

if TYPE_CHECKING:
    from vitclinic.tasks.contrastive import Contrastive
    from vitclinic.tasks.retrieval import Retrieval
    from vitclinic.treatments import Losses


class Compared(NamedTuple):
    """Features of all images of a step, without a gradient: N images in V views."""

    features: Tensor
    """[V, N, D]."""
    labels: Tensor
    """[N]."""
    keys: Tensor
    """[N], by which the images of a pass are found among them."""


class ComparisonCriterion(Criterion):
    """Base of criteria with a loss of all features of a step; it keeps those of the other images.

    Args:
        head: What makes the features that are compared of the network's.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.step: Compared | None = None

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Tensor:
        """Return the loss of all images of a step: a mean over them."""
        raise TypeError(f"{type(self).__name__} must implement compare().")

    def prepare(self, network: nn.Module, batches: Sequence[Batch], moment: Moment, divided: bool) -> list[Batch]:
        """Compute the features of all images beforehand if a pass sees only a part of this process's images."""
        self.step = None
        if divided:
            with torch.no_grad(), keep_buffers(network):
                own = [self._project(network, batch)[1] for batch in batches]
            labels, keys = (torch.cat([getattr(b, name) for b in batches]) for name in ("targets", "keys"))
            self.step = _gather(Compared(torch.cat(own, dim=1), labels, keys))
        return list(batches)

    def _project(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the network's features of the first view, and the projected ones of all views [V, B, D]."""
        views = [batch.images, *batch.crops]
        features = network(torch.cat(views))
        projected: Tensor = self.head(features).unflatten(0, (len(views), len(batch)))
        return features[: len(batch)], projected

    def compare_with_all(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the network's features of a pass, and the loss of the whole step."""
        outputs, own = self._project(network, batch)
        if self.step is None and Distributed.current().size == 1:  # these are all
            return outputs, self.compare(own.flatten(0, 1), batch.targets.repeat(len(own)))
        if self.step is None:  # SAM's second pass compares with the features of the first
            self.step = _gather(Compared(own.detach(), batch.targets, batch.keys))
        others = ~torch.isin(self.step.keys, batch.keys).to(own.device)
        features = torch.cat([own, self.step.features[:, others].to(own.dtype)], dim=1)
        labels = torch.cat([batch.targets, self.step.labels[others]])
        loss = self.compare(features.flatten(0, 1), labels.repeat(len(own)))
        parts = features.shape[1] / len(batch)
        # The value is that of the whole batch, the gradient `parts` times that of these images: see above.
        return outputs, loss.detach() + parts * (loss - loss.detach())


class ContrastiveCriterion(ComparisonCriterion):
    """Supervised contrastive learning, with its projection head.

    Args:
        task: The options.
        network: The network, without a head.
        spec: The images.
    """

    def __init__(self, task: Contrastive, network: nn.Module, spec: ImageSpec) -> None:
        layers = [nn.Linear(count_features(network, spec), task.hidden), nn.ReLU()]
        super().__init__(_beside(network, nn.Sequential(*layers, nn.Linear(task.hidden, task.projection))))
        self.temperature = task.temperature

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Tensor:
        return supervised_contrastive_loss(features_nd, labels_n, self.temperature)

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        outputs, loss = self.compare_with_all(network, batch)
        return outputs, {"contrastive": loss}


class RetrievalCriterion(ComparisonCriterion):
    """A classifier of the training identities, and the batch-hard triplet loss of the features.

    Args:
        task: The options.
        network: The network, without a head.
        spec: The images.
    """

    def __init__(self, task: Retrieval, network: nn.Module, spec: ImageSpec) -> None:
        super().__init__(nn.Identity())
        self.task = task
        self.classifier = _beside(network, nn.Linear(count_features(network, spec), spec.num_classes))

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Tensor:
        return triplet_loss(features_nd, labels_n, self.task.margin)

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        outputs, triplet = self.compare_with_all(network, batch)
        identity = softmax_loss(self.classifier(outputs), batch.targets)
        return outputs, {"identity": self.task.identity * identity, "triplet": self.task.triplet * triplet}


def _beside(network: nn.Module, head: nn.Module) -> nn.Module:
    """Return a head on the device of a network, with its dtype."""
    parameter = next(network.parameters())
    return head.to(parameter.device, parameter.dtype)


def _gather(own: Compared) -> Compared:
    """Return the features of all processes; each must call this."""
    found = Distributed.current().gather(lambda: tuple(part.cpu() for part in own))
    device = own.features.device
    features, labels, keys = (list(parts) for parts in zip(*found, strict=True))
    return Compared(torch.cat(features, dim=1).to(device), torch.cat(labels).to(device), torch.cat(keys))
