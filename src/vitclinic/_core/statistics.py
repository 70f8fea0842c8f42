"""Confidence intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]


def share_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval for a share, such as an accuracy.

    By hand, for `successes` and `trials` may be fractions: VQA's accuracy gives a part of an answer, and counts
    correlated questions as fewer; `scipy.stats.binomtest` takes integers only. Where they are integers it is scipy's.

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


def paired_share_interval(lost: int, gained: int, trials: int, confidence: float = 0.95) -> Interval:
    """Return the adjusted Wald interval for a difference of two shares on the same trials [Bonett and Price 2012].

    The difference is (lost - gained) / trials: `lost` trials were successes only in the first case and `gained` only in
    the second.

    One trial is added to either kind of change, so that an interval does not vanish where nothing changed.

    Example:
        >>> low, high = paired_share_interval(12, 2, 100)
        >>> round(low, 3), round(high, 3)
        (0.024, 0.173)
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    down, up = (lost + 1) / (trials + 2), (gained + 1) / (trials + 2)
    half = z * math.sqrt((down + up - (down - up) ** 2) / (trials + 2))
    return max(-1.0, down - up - half), min(1.0, down - up + half)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the interval between two order statistics for the median, exact for any distribution.

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


def jackknife_half_width(without_each: ArrayLike, confidence: float = 0.95) -> NDArray[np.float64]:
    """Return half of the jackknife t interval of an estimate.

    For a mean and groups of one sample, this is the usual t interval of the mean.

    Args:
        without_each: The estimate without each group of samples, along the first axis; at least two groups of nearly
            equal size.
        confidence: The confidence level.

    Example:
        >>> samples = np.array([1.0, 2.0, 6.0])
        >>> round(float(jackknife_half_width([np.delete(samples, i).mean() for i in range(3)])), 3)
        6.572
    """
    from scipy.special import stdtrit  # a tenth of a second that only this needs

    values = np.asarray(without_each, dtype=np.float64)
    groups = len(values)
    if groups < 2:
        raise ValueError(f"a jackknife needs at least two groups (got {groups})")
    variance = (groups - 1) / groups * ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    half: NDArray[np.float64] = float(stdtrit(groups - 1, 0.5 + confidence / 2)) * np.sqrt(variance)
    return half


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return Student's interval for the mean of independent values, or None for fewer than two.

    Example:
        >>> low, high = t_interval([1.0, 2.0, 6.0])
        >>> round(low, 3), round(high, 3)
        (-3.572, 9.572)
    """
    running = RunningMean()
    running.add(list(values))
    if running.n < 2:
        return None
    half = float(running.half_width(confidence))
    return float(running.mean) - half, float(running.mean) + half


def t_test(values: Sequence[float]) -> float:
    """Return the two-sided p value of Student's test that the mean of two or more values is 0.

    Example:
        >>> round(t_test([0.05, 0.06, 0.04]), 4)
        0.0131
    """
    from scipy.special import stdtr  # a tenth of a second that only this needs

    n, mean = len(values), math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    same = 0.0 if mean else 1.0  # what p is where all values are the same
    return same if error == 0 else float(2 * stdtr(n - 1, -abs(mean) / error))


def t_power(effect: float, pairs: int, alpha: float = 0.05) -> float:
    """Return how often Student's two-sided test decides for the right side, by the noncentral t distribution.

    Args:
        effect: The true mean in standard deviations of one value.
        pairs: The number of values, two or more.
        alpha: The level of the test.

    Example:
        >>> round(t_power(2.0, 5), 2), round(t_power(0.0, 5), 3)
        (0.91, 0.025)
    """
    from scipy.special import nctdtr, stdtrit  # a tenth of a second that only this needs

    return float(1 - nctdtr(pairs - 1, abs(effect) * math.sqrt(pairs), stdtrit(pairs - 1, 1 - alpha / 2)))


MOST_FLIPS = 2**14


def sign_flip_test(values: Sequence[float]) -> float:
    """Return the two-sided p value of the permutation test that values are symmetric about 0.

    It is the share of all choices of signs whose sum is at least as far from 0 as that of the values: exact for any
    symmetric distribution, also for numbers that are all the same, whose p is 2 / 2^n. Above 14 values, `MOST_FLIPS`
    random choices stand for all.

    Example:
        >>> sign_flip_test([-1.0] * 6), sign_flip_test([0.0, 0.0, 0.0])
        (0.03125, 1.0)
    """
    numbers = np.asarray(values, dtype=np.float64)
    n = len(numbers)
    if 2**n <= MOST_FLIPS:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], size=(MOST_FLIPS, n))
        signs[0] = 1
    sums = np.abs(signs @ numbers)
    return float((sums >= sums[0] * (1 - 1e-9)).mean())


@dataclass(frozen=True)
class PairedDifference:
    """Mean of `second - first` over pairs, such as runs with the same seed, with its interval and p value."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided, of the paired t test."""
    pairs: int


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, arms: int = 1
) -> PairedDifference:
    """Return the t interval and t test of paired differences, for two pairs or more.

    If `arms` arms are compared with the same first one, each interval is at 1 - (1 - confidence) / arms, so that all
    hold together at `confidence` [Bonferroni]; for their p values see `holm`.

    Example:
        >>> found = paired_difference([0.50, 0.52, 0.49], [0.55, 0.58, 0.53])
        >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), round(found.p, 4)
        (0.05, 0.025, 0.075, 0.0131)
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"at least two pairs are needed (got {len(first)} and {len(second)} values)")
    differences = [b - a for a, b in zip(first, second, strict=True)]
    interval = t_interval(differences, 1 - (1 - confidence) / arms)
    assert interval is not None
    mean = math.fsum(differences) / len(differences)
    return PairedDifference(mean, *interval, t_test(differences), len(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple comparisons, which controls the family-wise error rate [Holm 1979].

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


class RunningMean:
    """Mean and variance of samples that arrive in batches, in float64 and without storing them.

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
        """Add samples along the first axis."""
        samples = np.asarray(batch, dtype=np.float64)
        count = len(samples)
        if count == 0:
            return
        batch_of = RunningMean()
        batch_of.n, batch_of.mean = count, samples.mean(axis=0)
        batch_of._squares = ((samples - batch_of.mean) ** 2).sum(axis=0)
        self.merge(batch_of)

    def merge(self, other: RunningMean) -> None:
        """Add the samples of another one, as if they had arrived here."""
        if other.n == 0:
            return
        delta = other.mean - self.mean
        total = self.n + other.n
        self._squares = self._squares + other._squares + delta**2 * (self.n * other.n / total)
        self.mean = self.mean + delta * (other.n / total)
        self.n = total

    def half_width(self, confidence: float = 0.95) -> NDArray[np.float64]:
        """Return half of the t interval of the mean; NaN for fewer than two samples."""
        if self.n < 2:
            return np.full_like(self.mean, math.nan)
        from scipy.special import stdtrit  # a tenth of a second that only this needs

        quantile = float(stdtrit(self.n - 1, 0.5 + confidence / 2))
        half: NDArray[np.float64] = quantile * np.sqrt(self._squares / (self.n - 1) / self.n)
        return half
