"""Verdicts: judge the claim of a study by the numbers of its runs.

The rule is the same for all studies. First come the conditions of the study's regime, on every run that they name: if
one does not hold, the claim is *not testable here*, whatever the comparisons say. Then runs are paired by seed. A
comparison is one number per seed: the difference of two arms, or of an arm and a number, or the slope of a trend. With
m comparisons in a study each is tested at 0.05 / m (Bonferroni), two-sided, so that a study is wrong on at most 5% of
null data. A comparison is

  as claimed   if p is at most 0.05 / m and the mean on the side that the claim says,
  opposite     if it is on the other side,
  undecided    otherwise.

(A trend may be compared with another slope than 0: `than`.) The test is Student's, which is to say that the t interval
of the mean does not hold 0. Numbers that are few and often the same (Kendall's tau over units, whether a run diverged,
stalled or learned, the largest rate at which it did) have no spread that t could judge by: their signs are permuted
instead, which is exact for numbers that are symmetric about 0 if nothing differs. Five equal signs have p = 0.06 and
decide nothing; six have 0.03. Other numbers that are the same for all seeds are undecided: they are substitutes, most
often, such as chance for runs that all diverged.

The claim is *reproduced* if all its comparisons are as claimed, *not reproduced* if one is opposite, *undecided*
otherwise. A verdict on fewer than five seeds, or on those seeds alone that have a number, is *exploratory*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitclinic._core.statistics import paired_share_interval, sign_flip_test, t_interval, t_power, t_test
from vitclinic.experiments.study.expectations import Condition, Expectation, Term
from vitclinic.experiments.study.ladder import Ladder
from vitclinic.experiments.study.schema import Study
from vitclinic.reports.study_result import EXPLORATORY, Checked, Comparison, Status, Word

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
    conditions: tuple[Checked, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}{EXPLORATORY}" if self.exploratory else self.word


def judge(study: Study, values: Values, seeds: Sequence[int]) -> Verdict:
    """Return the verdict on a study's claim from the numbers of its runs."""
    checked = tuple(check_condition(condition, study, values, seeds) for condition in study.conditions)
    values = {**values, **_climb_ladders(study, values, seeds)}
    alpha = 0.05 / len(study.expectations)
    comparisons = tuple(_compare(expected, study, values, seeds, alpha) for expected in study.expectations)
    statuses = {comparison.status for comparison in comparisons}
    word: Word = "undecided"
    if not all(one.holds for one in checked):
        word = "not testable here"
    elif "opposite" in statuses:
        word = "not reproduced"
    elif statuses == {"as claimed"}:
        word = "reproduced"
    exploratory = any(c.seeds < ENOUGH_SEEDS or c.missing for c in comparisons)
    return Verdict(word, exploratory, comparisons, checked)


def check_condition(condition: Condition, study: Study, values: Values, seeds: Sequence[int]) -> Checked:
    """Return whether a condition holds in every run that it names, with the number that is farthest out."""
    arms = condition.list_arms() or [arm for arm, _ in study.all_arms()]
    log = study.measures[condition.measure].log
    margins: list[tuple[float, str]] = []
    for seed in seeds:
        numbers = [values.get(arm, {}).get(seed, {}).get(condition.measure, math.nan) for arm in arms]
        if condition.match is not None and condition.within is not None:
            factor = _factor(numbers[0], numbers[1], log)
            said = f"a factor of {factor:.3g} between {arms[0]} and {arms[1]}, seed {seed}, of at most"
            margins.append((condition.within - factor, f"{said} {condition.within:g}"))
        else:
            for arm, number in zip(arms, numbers, strict=True):
                sides = [] if condition.least is None else [(number - condition.least, "at least", condition.least)]
                sides += [] if condition.most is None else [(condition.most - number, "at most", condition.most)]
                margins += [
                    (margin, f"{condition.measure} {number:.3g} of {arm}, seed {seed}, where {word} {limit:g} is asked")
                    for margin, word, limit in sides
                ]
    worst = min(margins, key=lambda one: -math.inf if math.isnan(one[0]) else one[0], default=(math.nan, "no run"))
    return Checked(condition.says, worst[0] >= 0, worst[1])


def _factor(first: float, second: float, log: bool) -> float:
    """Return by what factor two numbers differ, at least 1; NaN unless both are above 0."""
    if log:
        return float(10 ** abs(first - second))
    return max(first / second, second / first) if first > 0 and second > 0 else math.nan


MOST_SEEDS = 100


def estimate_power(expected: Expectation, study: Study, seeds: int) -> float | None:
    """Return how often a study of so many seeds finds the effect that the paper states; None if that is not known.

    It takes the effect and the spread over seeds from the expectation, and supposes normal numbers; for a test of signs
    it is a simulation.
    """
    if expected.effect is None or expected.spread is None or seeds < 2:
        return None
    alpha, shift = 0.05 / len(study.expectations), abs(expected.effect) / expected.spread
    if not study.measures[expected.measure].is_ordinal:
        return t_power(shift, seeds, alpha)
    draws = np.random.default_rng(0).normal(shift, 1.0, size=(300, seeds))
    return float(np.mean([sign_flip_test(row.tolist()) <= alpha and row.mean() > 0 for row in draws]))


def count_seeds(expected: Expectation, study: Study) -> int | None:
    """Return how many seeds find the paper's effect four times in five; None if not known, or beyond `MOST_SEEDS`."""
    if expected.effect is None or expected.spread is None or study.measures[expected.measure].is_ordinal:
        return None
    alpha, shift = 0.05 / len(study.expectations), abs(expected.effect) / expected.spread
    return next((seeds for seeds in range(2, MOST_SEEDS + 1) if t_power(shift, seeds, alpha) >= 0.8), None)


def _climb_ladders(study: Study, values: Values, seeds: Sequence[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Return ladders as arms: log2 of the largest value at which a run learned, for every measure of it."""
    learns = [name for name, measure in study.measures.items() if measure.result == "learns"]
    return {
        name: {seed: {measure: climb(ladder, name, values, seed, measure) for measure in learns} for seed in seeds}
        for name, ladder in study.ladders.items()
    }


def climb(ladder: Ladder, name: str, values: Values, seed: int, measure: str) -> float:
    """Return log2 of the largest value of a ladder at which a run learned; NaN if a run has no number.

    Where none learned it is one step below the first rung, a step being the mean one of the ladder.
    """
    learned = [values.get(arm, {}).get(seed, {}).get(measure, math.nan) for arm, _ in ladder.arms(name)]
    at = [math.log2(value) for value in ladder.values]
    if any(map(math.isnan, learned)):
        return math.nan
    return max(
        (rung for rung, one in zip(at, learned, strict=True) if one), default=at[0] - (at[-1] - at[0]) / (len(at) - 1)
    )


def _compare(expected: Expectation, study: Study, values: Values, seeds: Sequence[int], alpha: float) -> Comparison:
    numbers = {seed: compare_seed(expected, values, seed) for seed in seeds}
    known = [number for number in numbers.values() if not math.isnan(number)]
    mean = math.fsum(known) / len(known) if known else math.nan
    measure = study.measures[expected.measure]
    counted = measure.is_end and not any(term in study.ladders for term in expected.terms() if isinstance(term, str))
    low, high = _interval(known, 1 - alpha, counted)
    p = math.nan
    if measure.is_ordinal and len(known) > 1:
        p = sign_flip_test([number - expected.than for number in known])
    elif not math.isnan(low) and len(known) > 1:
        p = t_test([number - expected.than for number in known])
    status: Status = "undecided"
    if p <= alpha and mean != expected.than:
        status = "as claimed" if (mean > expected.than) == (expected.direction > 0) else "opposite"
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
        p=p,
        test="signs" if measure.is_ordinal else "t",
    )


def _interval(known: Sequence[float], confidence: float, counted: bool) -> tuple[float, float]:
    """Return the interval of the mean: of paired shares if runs are counted, else Student's; NaN without spread."""
    if counted and known:
        return paired_share_interval(known.count(1.0), known.count(-1.0), len(known), confidence)
    if len(known) < 2 or max(known) - min(known) <= _ROUNDING * max(map(abs, known)):
        return math.nan, math.nan
    return t_interval(known, confidence) or (math.nan, math.nan)


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
