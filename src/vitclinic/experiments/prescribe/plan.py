"""The plan of a prescription: its stages, how long a trial of each takes, and what each can tell.

Single remedies are selected by successive halving [Jamieson & Talwalkar 2016], with trials that start from scratch at
every rung, since a schedule has its own length; then combinations grow from the best, one remedy a rung. Every rung has
the same share of the selection's time, so that fewer arms get longer trials. A trial takes the same time in every arm
of its rung. The final comparison keeps its own share whatever the selection does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

FINAL = "final"
FINAL_SHARE = 0.4
"""Share of the budget for the final comparison."""
RESERVE = 0.06
"""Share of the budget for what the plan does not foresee."""
MOST = 12
"""The most remedies that are tried unless some are named: with more, each has a trial too short beside the final's."""
FEW = 8
"""So many are not halved further: what comes next is combining the best."""
GROWTHS = 3
"""The most remedies that are added to the best one."""
NEXT = 3
"""The most remedies that are tried beside each other in one growth."""
SELECTION_SEEDS = 5
"""The most seeds of a rung."""
FINAL_SEEDS = (5, 10)
"""The fewest and the most pairs of the final comparison."""
SEED_NOISE = 0.01
"""The standard deviation of a run's accuracy over seeds, beyond that of its images: an assumption."""
LARGEST_UNSEEN = 0.10
"""A stage has enough seeds to tell so large a difference of accuracy: one that could not is a lottery."""
_LEAST_SHRINK = 0.25


@cache
def detectable_difference(seeds: int, images: int, tested: bool) -> float:
    """Return the smallest difference of mean accuracy between two arms that stands out from noise.

    It is q sqrt(2 (p (1 - p) / n + s^2) / k) for n images and k seeds an arm. The accuracy p is taken as 1/2, where the
    binomial noise of the images is largest, and s as `SEED_NOISE`; that two arms see the same images lowers the noise
    and is not counted on. If the difference is `tested` by its t interval, q is Student's 97.5% quantile for k - 1: the
    interval is expected to be so wide to either side, and a true difference of that size is found about every second
    time. Otherwise q is 1.96: noise alone makes a larger difference once in twenty times.

    Example:
        >>> [round(detectable_difference(5, images, tested=True), 3) for images in (50, 500, 10_000)]
        [0.125, 0.043, 0.02]
    """
    from scipy.special import ndtri, stdtrit  # a tenth of a second that only this needs

    quantile = float(stdtrit(seeds - 1, 0.975) if tested else ndtri(0.975))
    return quantile * math.sqrt(2 * (0.25 / images + SEED_NOISE**2) / seeds)


@dataclass(frozen=True)
class Stage:
    """A rung of the selection, or the final comparison."""

    name: str
    arms: int
    """Including the plain recipe."""
    seeds: int
    seconds: float
    """The time of one trial, the same for every arm."""
    overhead: float
    """Seconds of a trial that are not training, such as building the network."""
    images: int
    """The number of images that its trials are scored on: of val, in the final comparison of test."""

    @property
    def final(self) -> bool:
        """True for the final comparison."""
        return self.name == FINAL

    @property
    def planned(self) -> float:
        """Seconds of the whole stage."""
        return self.arms * self.seeds * (self.seconds + self.overhead)

    @property
    def detectable(self) -> float:
        """The smallest difference of accuracy that it can tell."""
        return detectable_difference(self.seeds, self.images, tested=self.final)


def halve(candidates: int) -> list[int]:
    """Return how many single remedies are in each rung.

    Example:
        >>> halve(30), halve(12), halve(9), halve(8), halve(2), halve(1)
        ([30, 15, 8], [12, 6], [9, 5], [8], [2], [])
    """
    if candidates < 2:
        return []  # one candidate needs no selection
    rungs = [candidates]
    while rungs[-1] > FEW:
        rungs.append(-(-rungs[-1] // 2))
    return rungs


def make_plan(
    candidates: int, seconds: float, overhead: float, longest: float, images: Mapping[str, int]
) -> list[Stage]:
    """Return the rungs, the growths and the final comparison of `candidates` remedies within `seconds`.

    No trial is longer than `longest`, the recipe's own length: time beyond that goes into more seeds, and what is
    then still left stays unused. No rung's trial is longer than the final's.
    """
    sizes = [(f"rung {number}", 1 + singles) for number, singles in enumerate(halve(candidates), 1)]
    growths = range(1, min(GROWTHS, candidates - 1) + 1)
    sizes += [(f"growth {number}", 2 + min(NEXT, candidates - number)) for number in growths]
    available = seconds * (1 - RESERVE)
    share = available * (FINAL_SHARE if sizes else 1.0)
    final = _make_stage(FINAL, 2, share, overhead, longest, images["test"], *FINAL_SEEDS)
    rungs = [
        _make_stage(
            name, arms, (available - share) / len(sizes), overhead, final.seconds, images["val"], 1, SELECTION_SEEDS
        )
        for name, arms in sizes
    ]
    return [*rungs, final]


def _make_stage(
    name: str, arms: int, share: float, overhead: float, longest: float, images: int, fewest: int, most: int
) -> Stage:
    enough = (
        seeds for seeds in range(fewest, most) if Stage(name, 0, seeds, 0, 0, images).detectable <= LARGEST_UNSEEN
    )
    fewest = next(enough, most)
    trial = share / (arms * fewest) - overhead
    if trial <= longest:
        return Stage(name, arms, fewest, trial, overhead, images)
    seeds = max(fewest, min(most, int(share / (arms * (longest + overhead)))))
    return Stage(name, arms, seeds, longest, overhead, images)


def shrink(stages: Sequence[Stage], left: float, slowness: float) -> list[Stage]:
    """Return the stages to come, all shortened alike if they would take longer than the `left` seconds.

    `slowness` is how many times longer than planned the stages before took; a faster machine lengthens nothing.
    """
    expected = max(1.0, slowness) * sum(stage.planned for stage in stages)
    factor = max(_LEAST_SHRINK, min(1.0, left / expected)) if expected > 0 else 1.0
    if factor == 1.0:
        return list(stages)
    # The overhead of a trial does not shrink with it.
    return [
        replace(stage, seconds=max(0.0, factor * (stage.seconds + stage.overhead) - stage.overhead)) for stage in stages
    ]


def add_pairs(final: Stage, left: float, slowness: float) -> Stage:
    """Return the final comparison with as many pairs as the `left` seconds allow: growths may have ended early."""
    pair = max(1.0, slowness) * final.arms * (final.seconds + final.overhead)
    pairs = int((1 - RESERVE) * left / pair) if pair > 0 else 0
    return replace(final, seeds=max(final.seeds, min(FINAL_SEEDS[1], pairs)))


def count_affordable(
    wanted: int, seconds: float, overhead: float, longest: float, least: float, images: Mapping[str, int]
) -> int:
    """Return how many of `wanted` candidates the time allows if no trial may be shorter than `least` seconds."""
    for candidates in range(wanted, 0, -1):
        plan = make_plan(candidates, seconds, overhead, longest, images)
        if min(stage.seconds for stage in plan) >= min(least, longest):
            return candidates
    return 0


def find_needed_budget(
    candidates: int, overhead: float, longest: float, least: float, images: Mapping[str, int]
) -> float:
    """Return the seconds from which on all `candidates` get trials of at least `least` seconds."""
    low, high = 0.0, 1.0
    while count_affordable(candidates, high, overhead, longest, least, images) < candidates:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        enough = count_affordable(candidates, middle, overhead, longest, least, images) == candidates
        low, high = (low, middle) if enough else (middle, high)
    return high
