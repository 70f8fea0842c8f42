"""The arms of a prescription: the plain recipe, single treatments and pairs of the best; and the trials of an arm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        raise RecipeError("There is no treatment left to try: name some with --treatments.")
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
