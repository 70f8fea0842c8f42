"""Intervals: how sure a number is."""

from __future__ import annotations

import math
from statistics import NormalDist


def share_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
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
    return max(0.0, centre - half), min(1.0, centre + half)
