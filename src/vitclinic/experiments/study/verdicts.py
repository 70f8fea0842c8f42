"""Verdicts: judge the claim of a study by the numbers of its runs.

The rule is the same for all studies. Runs are paired by seed. A comparison is one number per seed: the difference of
two arms, or of an arm and a number, or the slope of a trend. Its mean has a t interval; with m comparisons in a study
each is at 1 - 0.05 / m (Bonferroni), so that all hold together at 95%. A comparison is

  as claimed   if its interval lies on the side that the claim says,
  opposite     if it lies on the other side,
  undecided    if it holds 0.

(A trend may be compared with another slope than 0: `than`.) Numbers that are the same for all seeds have no spread to
judge by, and are undecided too: they are substitutes, most often, such as chance for runs that all diverged.

The claim is *reproduced* if all its comparisons are as claimed, *not reproduced* if one is opposite, *undecided*
otherwise. A verdict on fewer than five seeds, or on those seeds alone that have a number, is *exploratory*. Shares of
runs (diverged or not) have Bonett and Price's paired interval in place of t's. With five to ten seeds and one
comparison it is wrong in at most 5% of null tables if the arms crash independently of each other (by enumeration); were
one arm to survive just where the other crashes, it could be 12.5% (at seven seeds, the worst of them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitclinic._core.statistics import paired_share_interval, t_interval
from vitclinic.experiments.study.schema import Expectation, Study, Term
from vitclinic.reports.study_result import EXPLORATORY, Comparison, Status, Word

ENOUGH_SEEDS = 5
_ROUNDING = 1e-9
"""Relative difference below which numbers are taken to be the same."""

Values = Mapping[str, Mapping[int, Mapping[str, float]]]
"""arm -> seed -> measure -> number; NaN, or nothing, where there is none."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of a study on its claim.

    Example:
        >>> str(Verdict("reproduced", exploratory=True, comparisons=()))
        'reproduced (exploratory)'
    """

    word: Word
    exploratory: bool
    """True with too few seeds for a verdict, or with seeds that lack a number."""
    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        return f"{self.word}{EXPLORATORY}" if self.exploratory else self.word


def judge(study: Study, values: Values, seeds: Sequence[int]) -> Verdict:
    """Return the verdict on a study's claim from the numbers of its runs."""
    confidence = 1 - 0.05 / len(study.expectations)
    binary = {name for name, measure in study.measures.items() if measure.result == "diverged"}
    comparisons = tuple(
        _compare(expected, values, seeds, confidence, expected.measure in binary) for expected in study.expectations
    )
    statuses = {comparison.status for comparison in comparisons}
    word: Word = "undecided"
    if "opposite" in statuses:
        word = "not reproduced"
    elif statuses == {"as claimed"}:
        word = "reproduced"
    exploratory = any(c.seeds < ENOUGH_SEEDS or c.missing for c in comparisons)
    return Verdict(word, exploratory, comparisons)


def _compare(
    expected: Expectation, values: Values, seeds: Sequence[int], confidence: float, binary: bool
) -> Comparison:
    numbers = {seed: compare_seed(expected, values, seed) for seed in seeds}
    known = [number for number in numbers.values() if not math.isnan(number)]
    mean = math.fsum(known) / len(known) if known else math.nan
    if binary and known:
        lost, gained = known.count(1.0), known.count(-1.0)
        low, high = paired_share_interval(lost, gained, len(known), confidence)
    elif len(known) < 2 or max(known) - min(known) <= _ROUNDING * max(map(abs, known)):
        low, high = math.nan, math.nan
    else:
        low, high = t_interval(known, confidence) or (math.nan, math.nan)
    status: Status = "undecided"
    than = expected.than
    if low > than or high < than:
        status = "as claimed" if (low > than) == (expected.direction > 0) else "opposite"
    return Comparison(
        says=expected.says,
        measure=expected.measure,
        direction=expected.direction,
        status=status,
        mean=mean,
        low=low,
        high=high,
        seeds=len(known),
        missing=len(numbers) - len(known),
        numbers=numbers,
    )


def compare_seed(expected: Expectation, values: Values, seed: int) -> float:
    """Return the comparison's number for one seed; NaN if something is missing."""

    def number(term: Term) -> float:
        if isinstance(term, str):
            return values.get(term, {}).get(seed, {}).get(expected.measure, math.nan)
        if isinstance(term, list):
            return number(term[0]) - number(term[1])
        return float(term)

    pair = expected.greater or expected.less
    if pair is not None:
        return number(pair[0]) - number(pair[1])
    trend = expected.grows or expected.falls or {}
    return slope(list(trend), [number(term) for term in trend.values()], expected.power)


def slope(at: Sequence[float], numbers: Sequence[float], power: bool = False) -> float:
    """Return the slope of the least-squares line through numbers over log2 of their positions.

    Args:
        at: The positions, above 0.
        numbers: One for each position.
        power: Take log2 of the numbers, too: the slope is then the exponent of a power law.

    Example:
        >>> slope([1, 2, 4], [5.0, 3.0, 1.0])
        -2.0
        >>> round(slope([1, 4, 16], [8.0, 4.0, 2.0], power=True), 6)
        -0.5
    """
    y = np.asarray(numbers, dtype=np.float64)
    if power:
        if not (y > 0).all():
            return math.nan
        y = np.log2(y)
    x = np.log2(np.asarray(at, dtype=np.float64))
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
