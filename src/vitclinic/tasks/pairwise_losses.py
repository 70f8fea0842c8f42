"""Criteria that compare every image of a step with all others, wherever they are: contrastive, and triplets.

The loss L(z_1, ..., z_P; v) is one of all features of a step, and of weights v such as a classifier's. A pass sees a
part p of the images: it computes z_p with a gradient and takes the others as constants, at the weights before the step.
Then, for the weights w of the network,

    dL/dw = sum_p dL/dz_p dz_p/dw

so that the mean over parts of P dL/dz_p dz_p/dw, and of dL/dv, is exactly the gradient of the whole batch, however it
is divided among processes, micro-batches and SAM's groups of m images, each of which climbs on its own images alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vitclinic._core.distributed import Distributed
from vitclinic._core.precision import upcast
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

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Losses:
        """Return the losses of all images of a step by name: means over them."""
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

    def needs_whole(self, divided: bool) -> bool:
        return divided

    def _project(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the network's features of the first view, and the projected ones of all views [V, B, D]."""
        views = [batch.images, *batch.crops]
        features = network(torch.cat(views))
        projected: Tensor = self.head(features).unflatten(0, (len(views), len(batch)))
        return features[: len(batch)], projected

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        """Return the network's features of a pass, and the losses of the whole step."""
        outputs, own = self._project(network, batch)
        if self.step is None and Distributed.current().size == 1:  # these are all
            return outputs, self.compare(own.flatten(0, 1), batch.targets.repeat(len(own)))
        if self.step is None:  # SAM's second pass compares with the features of the first
            self.step = _gather(Compared(own.detach(), batch.targets, batch.keys))
        others = ~torch.isin(self.step.keys, batch.keys).to(own.device)
        parts = self.step.features.shape[1] / len(batch)
        scaled = own.detach() + parts * (own - own.detach())  # the same value, `parts` times the gradient: see above
        features = torch.cat([scaled, self.step.features[:, others].to(own.dtype)], dim=1)
        labels = torch.cat([batch.targets, self.step.labels[others]])
        return outputs, self.compare(features.flatten(0, 1), labels.repeat(len(own)))


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

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Losses:
        return {"contrastive": supervised_contrastive_loss(features_nd, labels_n, self.temperature)}


class RetrievalCriterion(ComparisonCriterion):
    """A classifier of the training identities, behind a batch norm, and the batch-hard triplet loss of the features.

    The triplet loss reads the features, the classifier the features standardized over the images of a step: the neck of
    [Luo et al., CVPRW 2019]. Without it the two losses work against each other: an untrained ViT gives all images
    nearly the same features, and the triplet loss pulls them to one point before the classifier tells them apart.

    Args:
        task: The options.
        network: The network, without a head.
        spec: The images.
    """

    def __init__(self, task: Retrieval, network: nn.Module, spec: ImageSpec) -> None:
        super().__init__(nn.Identity())
        self.task = task
        classifier = nn.Linear(count_features(network, spec), spec.num_classes, bias=False)
        nn.init.normal_(classifier.weight, std=0.001)
        self.classifier = _beside(network, classifier)

    def compare(self, features_nd: Tensor, labels_n: Tensor) -> Losses:
        identity = softmax_loss(self.classifier(standardize(features_nd)), labels_n)
        triplet = triplet_loss(features_nd, labels_n, self.task.margin)
        return {"identity": self.task.identity * identity, "triplet": self.task.triplet * triplet}


def standardize(features_nd: Tensor, eps: float = 1e-5) -> Tensor:
    """Return features with mean 0 and variance 1 over the images, as a batch norm in training does.

    Example:
        >>> standardize(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.0000,  0.0000],
                [ 1.0000,  0.0000]])
    """
    with torch.autocast(features_nd.device.type, enabled=False):
        features = upcast(features_nd)
        variance, mean = torch.var_mean(features, dim=0, correction=0)
        return (features - mean) * torch.rsqrt(variance + eps)


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
