"""Intervals: how sure a number is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]


def share_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a share, such as an accuracy.

    Example:
        >>> low, high = share_interval(8, 10)
        >>> round(low, 3), round(high, 3)
        (0.49, 0.943)
    """
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    # At the ends the interval holds the share exactly, whatever the rounding.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == trials else centre + half


def paired_interval(lost: int, gained: int, trials: int, confidence: float = 0.95) -> Interval:
    """The interval for a difference of two shares of the same trials, such as an accuracy before and after a change.

    Of the `trials`, `lost` succeeded only before and `gained` only after; the difference is (lost - gained) / trials.
    It is the score interval [Tango 1998]: all differences that a test at this level would not reject, which is right
    also where little or nothing was lost or gained.

    Example:
        >>> low, high = paired_interval(8, 2, 100)
        >>> round(low, 3), round(high, 3)
        (-0.002, 0.134)
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)

    def edge(outside: float) -> float:
        inside = (lost - gained) / trials
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(_paired_score(lost, gained, trials, middle)) <= z:
                inside = middle
            else:
                outside = middle
        return inside

    return edge(-1.0), edge(1.0)


def _paired_score(lost: int, gained: int, n: int, difference: float) -> float:
    """How far a difference is from the observed one, in the standard errors that it would have if it were true."""
    half = ((2 * n - lost + gained) * difference - lost - gained) / 2
    spread = math.sqrt(max(0.0, half**2 + 2 * n * gained * difference * (1 - difference)))
    only_after = max(0.0, (spread - half) / (2 * n), -difference)
    variance = n * (2 * only_after + difference * (1 - difference))
    distance = lost - gained - n * difference
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """The interval for the median between two order statistics: exact for any distribution.

    It lies between the k-th smallest and the k-th largest value, k as large as the binomial distribution of the
    number of values below the median allows; None for fewer than six values, which cannot give 95%.

    Example:
        >>> median_interval([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
        (1.0, 6.0)
    """
    ordered = sorted(float(value) for value in values)
    n = len(ordered)
    outside, k = 2 * 0.5**n, 0
    while outside <= 1 - confidence and k < n // 2:
        k += 1
        outside += 2 * math.comb(n, k) * 0.5**n
    return None if k == 0 else (ordered[k - 1], ordered[n - k])


class RunningMean:
    """Mean and variance of samples that arrive in batches, in float64 and without keeping them.

    Samples may be numbers or arrays of one shape; batches are merged by their means and sums of squared deviations
    (Chan, Golub and LeVeque 1979), which does not cancel.

    Example:
        >>> running = RunningMean()
        >>> running.add([1.0, 2.0])
        >>> running.add([6.0])
        >>> float(running.mean), running.n
        (3.0, 3)
    """

    def __init__(self) -> None:
        self.n = 0
        self.mean: NDArray[np.float64] = np.zeros(())
        self._squares: NDArray[np.float64] = np.zeros(())

    def add(self, batch: ArrayLike) -> None:
        """Take in samples along the first axis."""
        samples = np.asarray(batch, dtype=np.float64)
        count = len(samples)
        if count == 0:
            return
        mean = samples.mean(axis=0)
        delta = mean - self.mean
        total = self.n + count
        self._squares = self._squares + ((samples - mean) ** 2).sum(axis=0) + delta**2 * (self.n * count / total)
        self.mean = self.mean + delta * (count / total)
        self.n = total

    def half_width(self, confidence: float = 0.95) -> NDArray[np.float64]:
        """Half of the t interval of the mean; NaN for fewer than two samples."""
        if self.n < 2:
            return np.full_like(self.mean, math.nan)
        from scipy.special import stdtrit  # a tenth of a second that only this needs

        quantile = float(stdtrit(self.n - 1, 0.5 + confidence / 2))
        half: NDArray[np.float64] = quantile * np.sqrt(self._squares / (self.n - 1) / self.n)
        return half
