"""The base of the curvature probes: their options, and the loss surface of a subject."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.time import Time
from vitclinic.data import Batch
from vitclinic.probes.curvature.loss_surface import LossName, LossSurface, Mode
from vitclinic.probes.curvature.pixels import choose_network
from vitclinic.probes.probe import Need, OwningProbe
from vitclinic.probes.subject import Subject


class CurvatureProbe(OwningProbe):
    """Base class of probes of the loss as a function of the weights; on training images by default [chen2022]."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits", "gradients"})
    by_default: ClassVar[bool] = False

    split: Literal["train", "val", "test"] = Field("train", description="split of the images")
    images: Annotated[int, Field(ge=1)] = Field(256, description="number of images")
    batch_norm: Mode = Field("eval", description="BatchNorm statistics: running (eval), or of each batch (train)")
    loss: LossName = Field("softmax", description="cross-entropy of softmax, or of each class's sigmoid")
    budget: Time | None = Field(None, description="time limit, as in 2m; the result is then the best estimate so far")

    def view(self, subject: Subject) -> Subject:
        return subject.on(self.split, self.images)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the batch size if it matters: with batch statistics, the loss depends on how images are batched."""
        if self.batch_norm == "eval":
            return {}
        processes = subject.distributed.size
        return {"batch_size": subject.batch_size, **({"processes": processes} if processes > 1 else {})}

    def peak_memory(self, subject: Subject) -> float:
        """Return what values of the loss take at displaced weights: all images, the weights, a batch's forward pass."""
        footprint, size = subject.footprint, min(subject.batch_size, len(subject))
        held = footprint.image * (len(subject) - size)
        return held + footprint.weights + footprint.forward(size)

    def surface(self, subject: Subject, *, regularised: bool = False) -> LossSurface:
        """Return the loss on the subject's images, of which each process holds its share."""
        return build_surface(
            subject,
            subject.own_batches(),
            self.batch_norm,
            loss=self.loss,
            regularised=regularised,
            distributed=subject.distributed,
        )


def build_surface(
    subject: Subject,
    batches: Iterable[Batch],
    batch_norm: Mode = "eval",
    *,
    loss: LossName = "softmax",
    regularised: bool = False,
    distributed: Distributed = ALONE,
) -> LossSurface:
    """Return the loss of a subject's network on some batches, with its training's weight decay if `regularised`."""
    training = subject.training if regularised else None
    network = choose_network(subject)
    if training is None:
        return LossSurface(network, batches, mode=batch_norm, loss=loss, distributed=distributed)
    decayed = [p for name, p in network.named_parameters() if name in training.decayed]
    return LossSurface(
        network,
        batches,
        decay=training.decay,
        decayed=decayed,
        mode=batch_norm,
        loss=loss,
        distributed=distributed,
    )
