"""Numbers about images with their 95% intervals: a share of them, a mean over them, a part lost of an accuracy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vitclinic.measurement import Scalar
from vitclinic.probes.probe import mean_scalar
from vitclinic.statistics import RunningMean, paired_share_interval, share_interval

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
    """The mean over images of a value of each."""
    running = RunningMean()
    running.add(values)
    return mean(running, least, most)


def mean(running: RunningMean, least: float = -math.inf, most: float = math.inf) -> Scalar:
    """The mean of values that lie between `least` and `most`, with a t interval where there are two or more."""
    found = mean_scalar(running)
    if found.low is None or found.high is None:
        return found
    return Scalar(value=found.value, low=max(least, found.low), high=min(most, found.high), n=found.n)
