"""The plan of a prescription: how many arms each rung has, and how long a trial is. Pure arithmetic.

Successive halving [Jamieson & Talwalkar 2016], with trials that start anew at every rung, since a schedule has its own
length: every rung has the same share of the selection's time, so that fewer arms get longer trials. A trial takes the
same time in every arm of its rung. The final comparison keeps its own share whatever the selection does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FINAL_SHARE = 0.4
"""Of the budget, for the final comparison."""
RESERVE = 0.06
"""Of the budget, for what the plan does not foresee."""
BEST = 3
"""So many single treatments come to the last rung, with their pairs."""
SELECTION_SEEDS = 5
"""Most seeds of a rung."""
FINAL_SEEDS = (5, 10)
"""Fewest and most pairs of the final comparison."""
_LEAST_SHRINK = 0.25


@dataclass(frozen=True)
class Stage:
    """A rung of the selection, or the final comparison."""

    name: str
    arms: int
    """With the plain recipe and, in the last rung, all pairs."""
    seeds: int
    seconds: float
    """Of one trial, the same for every arm."""
    overhead: float
    """Seconds that a trial takes beside its training, such as building the network."""

    @property
    def planned(self) -> float:
        """Seconds in all."""
        return self.arms * self.seeds * (self.seconds + self.overhead)


def halved(candidates: int) -> list[int]:
    """How many single treatments are in each rung.

    Example:
        >>> halved(16), halved(9), halved(4), halved(2), halved(1)
        ([16, 8, 3], [9, 5, 3], [4, 3], [2], [])
    """
    if candidates < 2:
        return []  # one candidate needs no selection
    rungs = [candidates]
    while rungs[-1] > BEST:
        half = -(-rungs[-1] // 2)
        rungs.append(half if half > BEST + 1 else BEST)
    return rungs


def pairs_among(singles: int) -> int:
    return singles * (singles - 1) // 2


def make_plan(candidates: int, seconds: float, overhead: float, longest: float) -> list[Stage]:
    """The rungs and the final comparison of `candidates` treatments within `seconds`.

    No trial is longer than `longest`, the recipe's own length: time beyond that goes into more seeds, and what is
    then still left stays unused. No rung's trial is longer than the final's.
    """
    rungs = halved(candidates)
    available = seconds * (1 - RESERVE)
    final_share = available * (FINAL_SHARE if rungs else 1.0)
    final = _stage("final", 2, final_share, overhead, longest, *FINAL_SEEDS)
    stages = []
    for number, singles in enumerate(rungs, 1):
        arms = 1 + singles + (pairs_among(singles) if number == len(rungs) else 0)
        share = (available - final_share) / len(rungs)
        stages.append(_stage(f"rung {number}", arms, share, overhead, final.seconds, 1, SELECTION_SEEDS))
    return [*stages, final]


def _stage(name: str, arms: int, share: float, overhead: float, longest: float, fewest: int, most: int) -> Stage:
    trial = share / (arms * fewest) - overhead
    if trial <= longest:
        return Stage(name, arms, fewest, trial, overhead)
    seeds = max(fewest, min(most, int(share / (arms * (longest + overhead)))))
    return Stage(name, arms, seeds, longest, overhead)


def shrunk(stages: Sequence[Stage], left: float, slowness: float) -> list[Stage]:
    """The stages to come, shortened alike where they would take longer than the `left` seconds.

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


def most_candidates(wanted: int, seconds: float, overhead: float, longest: float, least: float) -> int:
    """How many of `wanted` candidates the time allows, if a trial of any stage is to take `least` seconds."""
    for candidates in range(wanted, 0, -1):
        plan = make_plan(candidates, seconds, overhead, longest)
        if min(stage.seconds for stage in plan) >= min(least, longest):
            return candidates
    return 0


def needed_budget(candidates: int, overhead: float, longest: float, least: float) -> float:
    """Seconds from which on the plan has trials of `least` seconds for all `candidates`."""
    low, high = 0.0, 1.0
    while most_candidates(candidates, high, overhead, longest, least) < candidates:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        enough = most_candidates(candidates, middle, overhead, longest, least) == candidates
        low, high = (low, middle) if enough else (middle, high)
    return high
