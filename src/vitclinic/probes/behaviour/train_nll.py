"""NLL of training images, augmented as in training [park2022 Fig. 5]."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitclinic._core.registry import KeyScalars
from vitclinic.data import Batch
from vitclinic.probes.behaviour.behaviour_probe import divide_images
from vitclinic.probes.behaviour.intervals import mean_over
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.probe import Cheaper, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject


@register
class TrainNLL(OwningProbe):
    """NLL of training images, augmented as in the network's own training [park2022 Fig. 5].

    nll = 1/n sum_i sum_k -y_i(k) log p_i(k), with soft targets y if the training mixes images or smooths labels. Its
    minimum is then the entropy of the targets, which is reported as well, instead of 0.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> TrainNLL()(model, loader).scalars["target_entropy"].value  # hard labels
        0.0
    """

    name = "train_nll"
    group = "Behaviour"
    rank = 160
    title = "Likelihood of training images"
    question = "How well does it fit what it was trained on?"
    paper = "Park and Kim 2022, Fig. 5, 7a (P5)"
    key_scalars: ClassVar[KeyScalars] = {"nll": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 512},)

    images: Annotated[int, Field(ge=1)] = Field(2048, description="number of images, the first of the augmented stream")
    augment: bool = Field(True, description="augment as in the run's training, if it is known")

    def view(self, subject: Subject) -> Subject:
        return subject.on("train", strict=True)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        if subject.training is None or not self.augment:
            return {}
        return {"augment": subject.training.augment.resolve().identity()}

    def count(self, subject: Subject) -> int:
        """Return the number of images; without augmentation, each is used once at most."""
        repeated = self.augment and subject.training is not None
        return self.images if repeated else min(self.images, len(subject))

    def forwards(self, subject: Subject) -> float:
        return float(self.count(subject))

    def measure(self, subject: Subject) -> Result:
        count, size = self.count(subject), subject.batch_size
        nll, entropy = np.zeros(count), np.zeros(count)
        mine = range(-(-count // size))[subject.distributed.rank :: subject.distributed.size]

        def measure_batch(numbered: tuple[int, Batch]) -> int:
            number, batch = numbered
            places = np.arange(number * size, min((number + 1) * size, count))
            part = batch.split(len(places))[0]
            with torch.no_grad():
                logits = check_logits(subject.logits(part.images), subject.name)
            log_p = logits.cpu().double().log_softmax(1)
            y_bk = shares(part.targets.cpu(), log_p.shape[1])
            nll[places] = -(y_bk * log_p).sum(1).numpy()
            entropy[places] = torch.special.entr(y_bk).sum(1).numpy()
            return len(places)

        batches = zip(mine, subject.augmented_batches(size, len(mine), self.augment, which=mine), strict=True)
        divide_images(subject, self.name, count, batches, measure_batch, (nll, entropy))
        return Result({"nll": mean_over(nll, 0.0), "target_entropy": mean_over(entropy, 0.0)})


def shares(targets: Tensor, classes: int) -> Tensor:
    """Return hard or soft targets as class probabilities, [B, K] in float64."""
    hard = targets.ndim == 1
    return torch.nn.functional.one_hot(targets, classes).double() if hard else targets.double()
