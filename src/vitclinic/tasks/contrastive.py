"""Supervised contrastive learning [Khosla et al., NeurIPS 2020; chen2022 App. C].

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from vitclinic.tasks.representation import NearestNeighbours
from vitclinic.tasks.task import register

if TYPE_CHECKING:
    from torch import nn

    from vitclinic.data import Augment, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion

Width = Annotated[int, Field(ge=1)]


@register
class Contrastive(NearestNeighbours):
    """Features by class: two views of an image, and all images of its class, are pulled together against the rest.

    Each image is compared with all images of the step, in whichever process or micro-batch they are. The network has
    no classifier; train one on its frozen features in a second run.

    Attributes:
        temperature: Temperature of the similarities.
        hidden: Width of the projection head.
        projection: Number of features that are compared.
    """

    name = "contrastive"
    title = "supervised contrastive learning"
    paper = "chen2022 App. C"
    learns_from: ClassVar[str] = "two views of an image"

    temperature: Annotated[float, Field(gt=0)] = Field(0.1, description="temperature of the similarities")
    hidden: Width = Field(2048, description="width of the projection head")
    projection: Width = Field(128, description="features that are compared")

    def passes(self, spec: ImageSpec) -> float:
        return 2.0

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.data import TrainingStream
        from vitclinic.data.augment import Augmenter

        return TrainingStream(dataset, augment, seed, [Augmenter(augment, dataset.size)] * 2)

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion:
        from vitclinic.tasks.pairwise_losses import ContrastiveCriterion

        return ContrastiveCriterion(self, network, spec)
