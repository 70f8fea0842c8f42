"""Code shared by the behaviour probes: choosing images, predicting, dividing the work, and 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic._core.records import Scalar
from vitclinic._core.statistics import RunningMean, paired_share_interval, share_interval
from vitclinic.probes.probe import Cheaper, Need, OwningProbe, mean_scalar
from vitclinic.probes.subject import Subject

_Z = 1.959964
"""Normal quantile of a 95% interval."""

Correct = NDArray[np.bool_]
"""For each image, whether it was classified correctly, [n]."""


def share(successes: int, trials: int) -> Scalar:
    """Return a proportion, such as an accuracy, with Wilson's interval.

    Example:
        >>> share(9, 10).value
        0.9
    """
    low, high = share_interval(successes, trials)
    return Scalar(value=successes / trials, low=low, high=high, n=trials)


def share_correct(correct: Correct) -> Scalar:
    """Return the share of images that were classified correctly."""
    return share(int(correct.sum()), len(correct))


def drop(clean: Correct, changed: Correct) -> Scalar:
    """Return the drop in accuracy between two versions of the same images, with a paired interval."""
    lost, gained = int((clean & ~changed).sum()), int((changed & ~clean).sum())
    low, high = paired_share_interval(lost, gained, len(clean))
    return Scalar(value=(lost - gained) / len(clean), low=low, high=high, n=len(clean))


def mean_over(values: NDArray[np.float64], least: float = -math.inf, most: float = math.inf) -> Scalar:
    """Return the mean of one value per image, with a t interval.

    If all values are the same, a t interval has no width. For values bounded by `least` and `most`, the interval then
    extends as far to either side as Wilson's does for a share of 0 or 1: z^2 / (n + z^2).
    """
    if math.isfinite(most - least) and np.ptp(values) == 0:
        value, n = float(values[0]), len(values)
        reach = _Z**2 / (n + _Z**2)
        return Scalar(value=value, low=max(least, value - reach), high=min(most, value + reach), n=n)
    running = RunningMean()
    running.add(values)
    return mean(running, least, most)


def mean(running: RunningMean, least: float = -math.inf, most: float = math.inf) -> Scalar:
    """Return the mean of values between `least` and `most`, with a t interval if there are two or more."""
    found = mean_scalar(running)
    if found.low is None or found.high is None:
        return found
    return Scalar(value=found.value, low=max(least, found.low), high=min(most, found.high), n=found.n)


T = TypeVar("T")


class BehaviourProbe(OwningProbe):
    """Base class of probes that show the network modified versions of the exam's images."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 128},)

    images: Annotated[int, Field(ge=1)] = Field(512, description="maximum number of images (stratified sample)")

    def view(self, subject: Subject) -> Subject:
        return subject if self.images >= len(subject) else subject.on(subject.split, self.images)


def divide_images(
    subject: Subject,
    what: str,
    total: int,
    mine: Iterable[T],
    measure_batch: Callable[[T], int],
    found: Iterable[NDArray[Any]],
) -> None:
    """Measure `total` images, each process its own share, and give all processes the results for all images.

    `measure_batch` takes one of this process's batches (`mine`), writes its results into the arrays `found` and returns
    the number of images in the batch. Entries that no process has written yet must be zero: the shares are summed.
    """
    arrays, distributed = list(found), subject.distributed

    def own() -> list[NDArray[Any]]:
        seen = 0
        for batch in mine:
            seen += measure_batch(batch)
            subject.progress(what, min(seen * distributed.size, total), total)
        return arrays

    shares = distributed.gather(own)
    for rank, theirs in enumerate(shares):
        if rank != distributed.rank:
            for array, other in zip(arrays, theirs, strict=True):
                array += other


def check_logits(logits: Tensor, name: str) -> Tensor:
    """Return the logits; raise a ModelError if any of them is NaN or infinite."""
    if not logits.isfinite().all():
        raise ModelError(f"{name} returns logits that are not finite (NaN or infinity).")
    return logits


@torch.no_grad()
def predict(subject: Subject, images: Tensor) -> Tensor:
    """Return the predicted class [B] of images in [0, 1]; ties go to the first class."""
    return check_logits(subject.logits(images.to(subject.dtype)), subject.name).argmax(1)


def is_correct(subject: Subject, images: Tensor, targets: Tensor) -> Correct:
    """Return which images [B] are classified correctly."""
    correct: Correct = (predict(subject, images) == targets).cpu().numpy()
    return correct
