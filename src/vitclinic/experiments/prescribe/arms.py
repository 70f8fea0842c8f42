"""The arms of a prescription: the plain recipe, the recipe with one remedy, and combinations that grow from the best.

Also the recipes of their trials, and the findings of an exam that suggest what to try first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.records import Finding, Suggestion
from vitclinic.exam.findings import find
from vitclinic.exam.reporting import read_stored
from vitclinic.experiments.prescribe.remedies import Entry, Remedy, find_remedy, known_remedies, treatment_remedy
from vitclinic.training import Recipe, Run
from vitclinic.training.recipe import CheckpointConfig, ValidationConfig
from vitclinic.training.schedule import in_steps
from vitclinic.treatments import parse_treatments

PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    """One alternative to try: the recipe with some remedies.

    Example:
        >>> from vitclinic.training import build_recipe
        >>> arm = Arm(tuple(find_remedy(entry, build_recipe()) for entry in ("lr x 3", "gap_head")))
        >>> Arm().name, arm.name, arm.apply(build_recipe()).optimizer.lr
        ('plain', 'lr x 3 + gap_head', 0.003)
    """

    changes: tuple[Remedy, ...] = ()

    @property
    def name(self) -> str:
        """The names of its remedies, or `plain`."""
        return " + ".join(remedy.name for remedy in self.changes) or PLAIN

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with all changes, in their order.

        Raises:
            RecipeError: The recipe does not take one of them.
        """
        for remedy in self.changes:
            recipe = remedy.apply(recipe)
        return recipe

    def record(self) -> list[dict[str, Any]]:
        """Return the changes as plain data."""
        return [{"name": remedy.name, "overrides": dict(remedy.overrides)} for remedy in self.changes]

    @classmethod
    def read(cls, changes: Sequence[Mapping[str, Any]]) -> Arm:
        """Return the arm that `record` has written."""
        return cls(TypeAdapter(tuple[Remedy, ...]).validate_python(changes))


def list_candidates(
    recipe: Recipe,
    treatments: Sequence[Entry] | None = None,
    remedies: Sequence[Entry] | None = None,
    first: Sequence[Remedy] = (),
) -> list[Arm]:
    """Return an arm for each of the `remedies` and `treatments`, or, if neither is given, for all that are known.

    Those that are in `first` come before the others, in that order; if all are tried, they are among them.

    Raises:
        RecipeError: There is no such remedy or treatment, or the recipe has it already.
    """
    if treatments is None and remedies is None:
        made = [*first, *known_remedies(recipe).values()]
    else:
        made = [find_remedy(entry, recipe) for entry in remedies or ()]
        made += [treatment_remedy(entry) for entry in treatments or ()]
    own = {treatment.name for treatment in recipe.treatments}
    for remedy in made:
        for treatment in parse_treatments(remedy.overrides.get("treatments", ())):
            if treatment.name in own:
                raise RecipeError(f"The recipe has the treatment '{treatment.name}' already: try others.")
    if not made:
        raise RecipeError("There is no remedy left to try: name some (`remedies`, or `treatments`).")
    places = {remedy.name: place for place, remedy in reversed(list(enumerate(first)))}
    arms = {remedy.name: Arm((remedy,)) for remedy in made}
    return sorted(arms.values(), key=lambda arm: places.get(arm.name, len(places)))


def explain_clash(arm: Arm, remedy: Remedy) -> str | None:
    """Return why a remedy cannot be added to an arm, if both set the same key; None if they do not."""
    own = frozenset().union(*(change.keys for change in arm.changes))
    shared = sorted(own & remedy.keys)
    if shared:
        return f"both set {' and '.join(shared)}"
    for one, other in ((own, remedy.keys), (remedy.keys, own)):
        if "model.name" in one and any(key.startswith("model.") for key in other):
            return "both change the network"
    return None


def grow(arm: Arm, remedy: Remedy) -> list[Arm]:
    """Return the arm with one more remedy, last, and also first if some treatments may have to precede others."""
    treated = [change for change in (*arm.changes, remedy) if "treatments" in change.overrides]
    orders = [Arm((*arm.changes, remedy)), Arm((remedy, *arm.changes))]
    return orders if remedy in treated and len(treated) > 1 else orders[:1]


@dataclass(frozen=True)
class Trials:
    """Short trials of the user's recipe."""

    recipe: Recipe
    own_steps: int
    """The recipe's own length."""
    images: Mapping[str, int]

    def warmup_share(self, recipe: Recipe) -> str:
        """Return an arm's warm-up as a share of the run; epochs and steps are those of the plain recipe's length."""
        warmup = in_steps(recipe.schedule.warmup, self.images["train"] / self.recipe.batch_size, self.own_steps)
        return f"{100 * min(1.0, warmup / self.own_steps):.2f}%"

    def make_recipe(self, arm: Arm, steps: int, seed: int, test: bool) -> Recipe:
        """Return the recipe of a trial, validated only at its end: every arm has one try at its best checkpoint.

        The warm-up is the same share of the trial as of the recipe's own length.
        """
        changed = arm.apply(self.recipe)
        return changed.model_copy(
            update={
                "schedule": changed.schedule.model_copy(update={"warmup": self.warmup_share(changed)}),
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


@dataclass(frozen=True)
class Reason:
    """A finding of an exam that suggests a remedy."""

    remedy: str
    finding: str
    severity: str
    statement: str
    numbers: Mapping[str, float]
    """What the finding is based on, the most important first."""
    why: str
    paper: str


def read_reasons(path: str | Path, recipe: Recipe) -> list[tuple[Remedy, Reason]]:
    """Return the remedies that the findings of an examined run suggest, most severe finding first.

    What the recipe has already, or what all arms have in common, is left out.

    Raises:
        RunError: The run has not been examined.
    """
    run = Run.open(path)
    measurements = read_stored(run)
    if not measurements:
        raise RunError(f"'{path}' has not been examined yet: run `vitclinic examine {path}` first.")
    named = {str(remedy.overrides): remedy for remedy in known_remedies(recipe).values()}
    own = {f"treatments.{treatment.name}" for treatment in recipe.treatments}
    found = []
    for finding in find(measurements, run.metrics):
        for suggestion in finding.suggestions:
            try:
                remedy = find_remedy(suggestion.treatment, recipe)
            except RecipeError:
                continue
            remedy = named.get(str(remedy.overrides), remedy)
            if not own & remedy.keys:
                found.append((remedy, _explain(remedy, finding, suggestion)))
    return found


def _explain(remedy: Remedy, finding: Finding, suggestion: Suggestion) -> Reason:
    return Reason(
        remedy=remedy.name,
        finding=finding.title,
        severity=finding.severity,
        statement=finding.statement,
        numbers={name: number.value for name, number in finding.numbers.items()},
        why=suggestion.why,
        paper=suggestion.paper,
    )
