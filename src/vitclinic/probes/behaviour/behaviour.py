"""What the behaviour probes share: which images, and what the network makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic.probes.estimates import Correct
from vitclinic.probes.probe import Cheaper, Need, OwningProbe
from vitclinic.probes.subject import Subject

T = TypeVar("T")


class BehaviourProbe(OwningProbe):
    """A probe that shows the network changed versions of the exam's images."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 128},)

    images: Annotated[int, Field(ge=1)] = Field(512, description="at most so many images, stratified")

    def view(self, subject: Subject) -> Subject:
        return subject if self.images >= len(subject) else subject.on(subject.split, self.images)


def see_together(
    subject: Subject, what: str, total: int, mine: Iterable[T], see: Callable[[T], int], found: Iterable[NDArray[Any]]
) -> None:
    """What all processes find out about `total` images, each about its own share of them, in all of them.

    `see` looks at one of `mine`, this process's batches, notes in the arrays `found` what it finds about the images in
    it, and says how many they are. What no process has noted yet is zero.
    """
    arrays, distributed = list(found), subject.distributed

    def own() -> list[NDArray[Any]]:
        seen = 0
        for batch in mine:
            seen += see(batch)
            subject.progress(what, min(seen * distributed.size, total), total)
        return arrays

    shares = distributed.gather(own)
    for rank, theirs in enumerate(shares):
        if rank != distributed.rank:
            for array, other in zip(arrays, theirs, strict=True):
                array += other


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
