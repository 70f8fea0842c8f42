"""What the behaviour probes share: which images, and what the network makes of them."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from vitclinic.errors import ModelError
from vitclinic.probes.estimates import Correct
from vitclinic.probes.probe import Cheaper, Need, OwningProbe
from vitclinic.probes.subject import Subject


class BehaviourProbe(OwningProbe):
    """A probe that shows the network changed versions of the exam's images."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 128},)

    images: Annotated[int, Field(ge=1)] = Field(512, description="at most so many images, stratified")

    def view(self, subject: Subject) -> Subject:
        return subject if self.images >= len(subject) else subject.on(subject.split, self.images)


def finite(logits: Tensor, name: str) -> Tensor:
    """The logits, unless there is one that is no number: then nothing is predicted."""
    if not logits.isfinite().all():
        raise ModelError(f"{name} gives logits that are not finite.")
    return logits


@torch.no_grad()
def predicted(subject: Subject, images: Tensor) -> Tensor:
    """The classes [B] that the network takes images in [0, 1] for; of equal logits the first."""
    return finite(subject.logits(images.to(subject.dtype)), subject.name).argmax(1)


def recognised(subject: Subject, images: Tensor, targets: Tensor) -> Correct:
    """Whether each image is taken for its target."""
    correct: Correct = (predicted(subject, images) == targets).cpu().numpy()
    return correct
