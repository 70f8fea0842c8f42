"""Numbers about images with their 95% intervals: a share of them, a mean over them, a part lost of an accuracy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.records import Scalar
from vitclinic._core.statistics import RunningMean, paired_share_interval, share_interval
from vitclinic.probes.probe import mean_scalar

_Z = 1.959964
"""The normal quantile of 95% intervals."""

Correct = NDArray[np.bool_]
"""Of each image, whether it was recognised."""


def share(successes: int, trials: int) -> Scalar:
    """A share, such as an accuracy, with Wilson's interval."""
    low, high = share_interval(successes, trials)
    return Scalar(value=successes / trials, low=low, high=high, n=trials)


def accuracy(correct: Correct) -> Scalar:
    """The share of images that were recognised."""
    return share(int(correct.sum()), len(correct))


def drop(clean: Correct, changed: Correct) -> Scalar:
    """What is lost of the accuracy on the same images, with a paired interval."""
    lost, gained = int((clean & ~changed).sum()), int((changed & ~clean).sum())
    low, high = paired_share_interval(lost, gained, len(clean))
    return Scalar(value=(lost - gained) / len(clean), low=low, high=high, n=len(clean))


def mean_over(values: NDArray[np.float64], least: float = -math.inf, most: float = math.inf) -> Scalar:
    """The mean over images of a value of each.

    If that is the same for all, a t interval would have no width. Where values are bounded it then reaches as far to
    either side as Wilson's does for a share of 0 or 1: z^2 / (n + z^2).
    """
    if math.isfinite(most - least) and np.ptp(values) == 0:
        value, n = float(values[0]), len(values)
        reach = _Z**2 / (n + _Z**2)
        return Scalar(value=value, low=max(least, value - reach), high=min(most, value + reach), n=n)
    running = RunningMean()
    running.add(values)
    return mean(running, least, most)


def mean(running: RunningMean, least: float = -math.inf, most: float = math.inf) -> Scalar:
    """The mean of values that lie between `least` and `most`, with a t interval where there are two or more."""
    found = mean_scalar(running)
    if found.low is None or found.high is None:
        return found
    return Scalar(value=found.value, low=max(least, found.low), high=min(most, found.high), n=found.n)
