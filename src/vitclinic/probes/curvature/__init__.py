"""Code shared by the curvature probes: choice of images, time budget, and the loss surface."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.time import Time, seconds
from vitclinic.data import Batch
from vitclinic.probes.curvature.surface import LossSurface, Mode
from vitclinic.probes.probe import Need, OwningProbe
from vitclinic.probes.subject import Subject


class CurvatureProbe(OwningProbe):
    """Base class of probes of the loss as a function of the weights; on training images by default [chen2022]."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits", "gradients"})
    by_default: ClassVar[bool] = False

    split: Literal["train", "val", "test"] = Field("train", description="split of the images")
    images: Annotated[int, Field(ge=1)] = Field(256, description="number of images")
    batch_norm: Mode = Field("eval", description="BatchNorm statistics: running (eval), or of each batch (train)")
    budget: Time | None = Field(None, description="time limit, as in 2m; the result is then the best estimate so far")

    def view(self, subject: Subject) -> Subject:
        return subject.on(self.split, self.images)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the batch size if it matters: with batch statistics, the loss depends on how images are batched."""
        if self.batch_norm == "eval":
            return {}
        processes = subject.distributed.size
        return {"batch_size": subject.batch_size, **({"processes": processes} if processes > 1 else {})}

    def surface(self, subject: Subject, *, regularised: bool = False) -> LossSurface:
        """Return the loss on the subject's images, of which each process holds its share."""
        return build_surface(
            subject, subject.own_batches(), self.batch_norm, regularised=regularised, distributed=subject.distributed
        )


def build_surface(
    subject: Subject,
    batches: Iterable[Batch],
    batch_norm: Mode = "eval",
    *,
    regularised: bool = False,
    distributed: Distributed = ALONE,
) -> LossSurface:
    """Return the loss of a subject's network on some batches, with its training's weight decay if `regularised`."""
    training = subject.training if regularised else None
    if training is None:
        return LossSurface(subject.network, batches, mode=batch_norm, distributed=distributed)
    decayed = [p for name, p in subject.network.named_parameters() if name in training.decayed]
    return LossSurface(
        subject.network, batches, decay=training.decay, decayed=decayed, mode=batch_norm, distributed=distributed
    )


class Clock:
    """Time budget of a measurement, or of a part of it (`share`).

    Clocks of processes differ: those that measure together stop when the first of them is late, so each must ask as
    often as the others.
    """

    def __init__(
        self, budget: str | int | float | None, *, share: float = 1.0, distributed: Distributed = ALONE
    ) -> None:
        self.ends = None if budget is None else time.monotonic() + share * seconds(budget)
        self.distributed = distributed

    def has_expired(self) -> bool:
        """Return True if any process is late."""
        return self.ends is not None and self.distributed.any(self.is_late())

    def is_late(self) -> bool:
        """Return True if this process's own time is up; for work inside a process, without synchronization."""
        return self.ends is not None and time.monotonic() >= self.ends
