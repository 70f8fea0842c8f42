"""The plan of a prescription: the arms, their trials, how many arms each rung has and how long a trial takes.

Arms are the plain recipe, single treatments and pairs of the best. Successive halving [Jamieson & Talwalkar 2016], with
trials that start anew at every rung, since a schedule has its own length: every rung has the same share of the
selection's time, so that fewer arms get longer trials. A trial takes the same time in every arm of its rung. The final
comparison keeps its own share whatever the selection does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RecipeError, RunError
from vitclinic.exam.findings import find
from vitclinic.exam.reporting import read_stored
from vitclinic.training import Recipe, Run
from vitclinic.training.optimizer import in_steps
from vitclinic.training.recipe import CheckpointConfig, ValidationConfig
from vitclinic.treatments import known_treatments, parse_treatments

Entry = str | dict[str, Any]
"""A treatment as a recipe lists it."""

PLAIN = "plain"

ORDER = ("conv_stem", "sam", "context_broadcasting", "patch_diversity", "local_attention", "gap_head", "uniform_heads")
"""Treatments in the order in which they are tried if the time is not enough for all: the main remedies first."""


@dataclass(frozen=True)
class Arm:
    """One alternative to try: the recipe with some treatments added.

    Example:
        >>> Arm().name, Arm(("gap_head", {"sam": {"rho": 0.05}})).name
        ('plain', 'gap_head + sam(rho=0.05)')
    """

    treatments: tuple[Entry, ...] = ()

    @property
    def name(self) -> str:
        """Its treatments with their options, or `plain`."""
        return " + ".join(_describe(entry) for entry in self.treatments) or PLAIN

    @property
    def kinds(self) -> frozenset[str]:
        """The names of its treatments, without their options."""
        return frozenset(entry if isinstance(entry, str) else next(iter(entry)) for entry in self.treatments)


def _describe(entry: Entry) -> str:
    if isinstance(entry, str):
        return entry
    ((name, options),) = entry.items()
    settings = ", ".join(f"{key}={value}" for key, value in (options or {}).items())
    return f"{name}({settings})" if settings else name


def list_candidates(recipe: Recipe, wanted: Sequence[Entry] | None = None, first: Sequence[str] = ()) -> list[Arm]:
    """Return one arm for each treatment: those `wanted`, or all that the recipe does not have yet.

    Treatments named in `first` come before the others.
    """
    own = {treatment.name for treatment in recipe.treatments}
    if wanted is None:
        others = sorted(set(known_treatments()) - set(ORDER))
        arms = [Arm((name,)) for name in (*ORDER, *others) if name not in own]
    else:
        for treatment in itertools.chain.from_iterable(parse_treatments([entry]) for entry in wanted):
            if treatment.name in own:
                raise RecipeError(f"The recipe has the treatment '{treatment.name}' already: try others.")
        arms = list({arm.name: arm for arm in (Arm((entry,)) for entry in wanted)}.values())
    if not arms:
        raise RecipeError("There is no treatment left to try: name some (`treatments`).")
    return sorted(arms, key=lambda arm: not arm.kinds & set(first))


def pair_up(best: Sequence[Arm]) -> Iterator[list[Arm]]:
    """Yield every two of the best in both orders, the likelier first, since some treatments must come before others."""
    for one, other in itertools.combinations(best, 2):
        if not one.kinds & other.kinds:
            yield [Arm(one.treatments + other.treatments), Arm(other.treatments + one.treatments)]


@dataclass(frozen=True)
class Trials:
    """Short trials of the user's recipe."""

    recipe: Recipe
    own_steps: int
    """The recipe's own length."""
    images: Mapping[str, int]

    def make_recipe(self, arm: Arm, steps: int, seed: int, test: bool) -> Recipe:
        """Return the recipe of a trial, validated only at its end: every arm has one try at its best checkpoint.

        The warm-up is the same share of the trial as of the recipe's own length.
        """
        warmup = in_steps(self.recipe.schedule.warmup, self.images["train"] / self.recipe.batch_size, self.own_steps)
        share = min(1.0, warmup / self.own_steps)
        return self.recipe.add_treatments(arm.treatments).model_copy(
            update={
                "schedule": self.recipe.schedule.model_copy(update={"warmup": f"{100 * share:.2f}%"}),
                "epochs": None,
                "max_time": None,
                "steps": steps,
                "validation": ValidationConfig(every="100%"),
                "checkpoint": CheckpointConfig(every="50%"),
                "test": test,
                "seed": seed,
                "out": None,
            }
        )


def suggest_treatments(path: str | Path) -> list[str]:
    """Return the treatments that the findings of an examined run suggest, most severe finding first.

    Suggestions that change the recipe in another way, such as its augmentation, are not treatments and left out.

    Raises:
        RunError: The run has not been examined.
    """
    run = Run.open(path)
    measurements = read_stored(run)
    if not measurements:
        raise RunError(f"'{path}' has not been examined yet: run `vitclinic examine {path}` first.")
    suggestions = (suggestion for finding in find(measurements, run.metrics) for suggestion in finding.suggestions)
    names = dict.fromkeys(suggestion.treatment for suggestion in suggestions)
    return [name for name in names if name in known_treatments()]


FINAL_SHARE = 0.4
"""Share of the budget for the final comparison."""
RESERVE = 0.06
"""Share of the budget for what the plan does not foresee."""
BEST = 3
"""The number of single treatments in the last rung, which has their pairs, too."""
SELECTION_SEEDS = 5
"""The most seeds of a rung."""
FINAL_SEEDS = (5, 10)
"""The fewest and the most pairs of the final comparison."""
_LEAST_SHRINK = 0.25


@dataclass(frozen=True)
class Stage:
    """A rung of the selection, or the final comparison."""

    name: str
    arms: int
    """Including the plain recipe and, in the last rung, all pairs."""
    seeds: int
    seconds: float
    """The time of one trial, the same for every arm."""
    overhead: float
    """Seconds of a trial that are not training, such as building the network."""

    @property
    def planned(self) -> float:
        """Seconds of the whole stage."""
        return self.arms * self.seeds * (self.seconds + self.overhead)


def halve(candidates: int) -> list[int]:
    """Return how many single treatments are in each rung.

    Example:
        >>> halve(16), halve(9), halve(4), halve(2), halve(1)
        ([16, 8, 3], [9, 5, 3], [4, 3], [2], [])
    """
    if candidates < 2:
        return []  # one candidate needs no selection
    rungs = [candidates]
    while rungs[-1] > BEST:
        half = -(-rungs[-1] // 2)
        rungs.append(half if half > BEST + 1 else BEST)
    return rungs


def count_pairs(singles: int) -> int:
    """Return how many pairs there are of so many treatments."""
    return singles * (singles - 1) // 2


def make_plan(candidates: int, seconds: float, overhead: float, longest: float) -> list[Stage]:
    """Return the rungs and the final comparison of `candidates` treatments within `seconds`.

    No trial is longer than `longest`, the recipe's own length: time beyond that goes into more seeds, and what is
    then still left stays unused. No rung's trial is longer than the final's.
    """
    rungs = halve(candidates)
    available = seconds * (1 - RESERVE)
    final_share = available * (FINAL_SHARE if rungs else 1.0)
    final = _make_stage("final", 2, final_share, overhead, longest, *FINAL_SEEDS)
    stages = []
    for number, singles in enumerate(rungs, 1):
        arms = 1 + singles + (count_pairs(singles) if number == len(rungs) else 0)
        share = (available - final_share) / len(rungs)
        stages.append(_make_stage(f"rung {number}", arms, share, overhead, final.seconds, 1, SELECTION_SEEDS))
    return [*stages, final]


def _make_stage(name: str, arms: int, share: float, overhead: float, longest: float, fewest: int, most: int) -> Stage:
    trial = share / (arms * fewest) - overhead
    if trial <= longest:
        return Stage(name, arms, fewest, trial, overhead)
    seeds = max(fewest, min(most, int(share / (arms * (longest + overhead)))))
    return Stage(name, arms, seeds, longest, overhead)


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


def count_affordable(wanted: int, seconds: float, overhead: float, longest: float, least: float) -> int:
    """Return how many of `wanted` candidates the time allows if no trial may be shorter than `least` seconds."""
    for candidates in range(wanted, 0, -1):
        plan = make_plan(candidates, seconds, overhead, longest)
        if min(stage.seconds for stage in plan) >= min(least, longest):
            return candidates
    return 0


def find_needed_budget(candidates: int, overhead: float, longest: float, least: float) -> float:
    """Return the seconds from which on all `candidates` get trials of at least `least` seconds."""
    low, high = 0.0, 1.0
    while count_affordable(candidates, high, overhead, longest, least) < candidates:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        enough = count_affordable(candidates, middle, overhead, longest, least) == candidates
        low, high = (low, middle) if enough else (middle, high)
    return high
