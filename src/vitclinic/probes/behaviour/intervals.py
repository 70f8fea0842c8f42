"""Shares, drops and means over images, with 95% intervals."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.records import Scalar
from vitclinic._core.statistics import RunningMean, paired_share_interval, share_interval
from vitclinic.probes.probe import mean_scalar

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
