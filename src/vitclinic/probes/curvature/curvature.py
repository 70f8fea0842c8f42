"""What all curvature probes share: which images, how long, and the surface that they measure."""

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
    """A probe of the loss as a function of the weights, by default on training images [chen2022 App. F]."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "gradients"})
    by_default: ClassVar[bool] = False

    split: Literal["train", "val", "test"] = Field("train", description="which images")
    images: Annotated[int, Field(ge=1)] = Field(256, description="how many of them")
    batch_norm: Mode = Field("eval", description="BatchNorm by its running statistics (eval), or by the batch (train)")
    budget: Time | None = Field(None, description="time after which the best estimate so far is the result, as in 2m")

    def view(self, subject: Subject) -> Subject:
        return subject.on(self.split, self.images)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """By the batch's statistics, a loss depends on which images share a batch."""
        if self.batch_norm == "eval":
            return {}
        processes = subject.distributed.size
        return {"batch_size": subject.batch_size, **({"processes": processes} if processes > 1 else {})}

    def surface(self, subject: Subject, *, regularised: bool = False) -> LossSurface:
        """The loss on the subject's images, of which each process holds its share."""
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
    """The loss of a subject's network on some batches, with the weight decay of its training if asked for."""
    training = subject.training if regularised else None
    if training is None:
        return LossSurface(subject.network, batches, mode=batch_norm, distributed=distributed)
    decayed = [p for name, p in subject.network.named_parameters() if name in training.decayed]
    return LossSurface(
        subject.network, batches, decay=training.decay, decayed=decayed, mode=batch_norm, distributed=distributed
    )


class Clock:
    """How long a measurement, or a part of it that gets a share of its budget, may still take.

    Clocks differ: processes that measure together stop when the first of them says so, and each must ask as often as
    the others.
    """

    def __init__(
        self, budget: str | int | float | None, *, share: float = 1.0, distributed: Distributed = ALONE
    ) -> None:
        self.ends = None if budget is None else time.monotonic() + share * seconds(budget)
        self.distributed = distributed

    def has_expired(self) -> bool:
        return self.ends is not None and self.distributed.any(self.is_late())

    def is_late(self) -> bool:
        """Whether this process's own clock has run out: inside work that it does by itself, without a meeting."""
        return self.ends is not None and time.monotonic() >= self.ends
