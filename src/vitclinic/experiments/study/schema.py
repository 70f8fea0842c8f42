"""The format of a study file: which runs to train, what to measure, and what the claim expects, fixed beforehand.

    claim: C6
    title: SAM lowers the missing rate between training points
    paper: chen2022
    source: Table 6, 57.9 -> 39.6%
    base: {model: {...}, data: {limit: 2000, augment: none}, epochs: 60}
    arms:
      AdamW: {}
      SAM: {treatments: [{sam: {rho: 0.1}}]}
    measures:
      missing_rate: {probe: missing_rate, scalar: missing_rate}
      train_nll: {probe: train_nll, scalar: nll}
    conditions:
      - {says: nothing is interpolated, measure: train_nll, least: 0.05}
    expectations:
      - {says: SAM lowers the missing rate, measure: missing_rate, less: [SAM, AdamW]}
    paper_scale: {base: {...}, seeds: 5}

An arm is what it changes of `base`. `axes` is short for all combinations of values of recipe keys, each an arm named
after them (`optimizer.lr=0.001, model.depth=6`), `ladders` for arms up to the largest rate that still learns, and
`matched` for arms at the loss of others; `starts` says which arms begin with the weights of another. Everything is
plain data, checked strictly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic.experiments.study.expectations import Condition, Expectation, Measure, match_pattern
from vitclinic.experiments.study.ladder import Ladder
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.overrides import Overrides, merge, nest, overlay

ScaleName = Literal["cpu", "paper"]

LONGEST_NAME = 60
"""Bytes of a claim: with what results and pages add to it, a file system must take it."""


def _check_name(claim: str) -> str:
    """Refuse a claim whose name cannot be that of its files."""
    if len(claim.encode()) > LONGEST_NAME:
        raise ValueError(f"write a name of at most {LONGEST_NAME} letters: the result's file is named after it")
    if claim.lower() == "index":
        raise ValueError("write another name: index.html is the page of all studies")
    if claim.lower().endswith("-paper"):
        raise ValueError("write another name: results at the paper's scale end in -paper")
    return claim


class Match(Config):
    """An arm at the epoch at which it is as far as the end of another one: `of` at the loss of `to`.

    It is measured as an arm of its own, on the epoch of `of` (those of `checkpoint.keep_epochs`) whose `measure` is
    nearest to that of `to` at its end.
    """

    of: str
    to: str
    measure: str = "train_nll"


class Scale(Config):
    """The changes that another scale makes to the base, to arms and to the number of seeds."""

    base: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    positions: dict[float, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="numbers along the study's trends that differ at this scale: {old: new}",
    )
    ladders: dict[str, list[Annotated[float, Field(gt=0)]]] = Field(
        default_factory=dict, description="the values of ladders that differ at this scale, as many as there are"
    )
    seeds: Annotated[int, Field(ge=1)] | None = None
    images: Annotated[int, Field(ge=1)] | None = Field(
        None, description="number of images, for a dry run; the data's own unless given"
    )
    classes: Annotated[int, Field(ge=1)] | None = Field(None, description="number of classes, for a dry run")
    size: Annotated[int, Field(ge=1)] | None = Field(None, description="pixels a side, for a dry run")


class Study(Config):
    """A claim as an experiment; `open_study` reads one by name or from a file, `study` conducts it."""

    claim: Annotated[
        str,
        match_pattern(r"\w[\w.-]*", "write a short name: the result's file is named after it"),
        AfterValidator(_check_name),
    ]
    title: str
    paper: str
    source: str = Field(description="figure or table, and the paper's numbers")
    base: dict[str, Any]
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    ladders: dict[str, Ladder] = Field(default_factory=dict)
    matched: dict[str, Match] = Field(default_factory=dict, description="arms at the loss of others: {name: {of, to}}")
    starts: dict[str, str] = Field(
        default_factory=dict, description="arms that begin with the last weights of another, seed by seed: {arm: other}"
    )
    seeds: Annotated[int, Field(ge=1)] = 5
    measures: dict[str, Measure]
    conditions: list[Condition] = Field(default_factory=list, description="the regime in which the claim lives")
    expectations: Annotated[list[Expectation], Field(min_length=1)]
    minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="minutes of training on two cores; in the catalogue an estimate, FLOPs at 45e9 a second"
    )
    blind: bool = Field(
        True,
        description="false if limits that the paper does not give were set after first looks at networks of this size",
    )
    note: str | None = Field(None, description="how the CPU scale differs from the paper, and what that leaves open")
    paper_scale: Scale = Scale()

    @model_validator(mode="after")
    def _known_names(self) -> Study:
        for axis, values in self.axes.items():
            if not values:
                raise ValueError(f"the axis '{axis}' has no values")
        arms: dict[str, dict[str, Any]] = {}
        for arm, changes in self.all_arms():
            if arm in arms:
                raise ValueError(f"there are two arms '{arm}'")
            arms[arm] = changes
            if "target" in changes and len(changes) > 1:
                raise ValueError(f"the arm '{arm}' is a target, which is measured as it is: remove its other keys")
        if not arms:
            raise ValueError("give arms, axes or ladders")
        self._check_measures()
        self._check_starts(arms)
        compared = [*arms, *self.matched, *self.ladders]
        for name, match in self.matched.items():
            if name in arms or name in self.ladders:
                raise ValueError(f"there are two arms '{name}'")
            for arm in (match.of, match.to):
                _check(arm, arms, f"the matched arm '{name}'")
            _check(match.measure, self.measures, f"the matched arm '{name}'")
        for condition in self.conditions:
            _check(condition.measure, self.measures, f"the condition '{condition.says}'")
            for arm in condition.list_arms():
                _check(arm, compared, f"the condition '{condition.says}'")
        for expected in self.expectations:
            self._check_expectation(expected, compared)
        for arm in self.paper_scale.arms:
            _check(arm, arms, "paper_scale")
        return self

    def _check_starts(self, arms: Mapping[str, Mapping[str, Any]]) -> None:
        for arm, other in self.starts.items():
            for name in (arm, other):
                _check(name, arms, "starts")
                if "target" in arms[name]:
                    raise ValueError(f"starts names '{name}', a target, which is not trained")
            if other in self.starts:
                raise ValueError(f"the arm '{arm}' starts from '{other}', which starts from another: give two stages")
            if "init" in arms[arm]:
                raise ValueError(f"the arm '{arm}' has both init and a start: give one")

    def _check_measures(self) -> None:
        names = list(self.measures)
        for name, measure in self.measures.items():
            for other in measure.difference or ():
                _check(other, self.measures, f"the measure '{name}'")
                if self.measures[other].difference and names.index(other) >= names.index(name):
                    raise ValueError(f"the measure '{name}' is a difference of '{other}', which must be listed before")

    def _check_expectation(self, expected: Expectation, arms: Collection[str]) -> None:
        where = f"the expectation '{expected.says}'"
        _check(expected.measure, self.measures, where)
        for term in expected.terms():
            for arm in (term,) if isinstance(term, str) else term if isinstance(term, list) else ():
                _check(arm, arms, where)
                if arm in self.ladders and self.measures[expected.measure].result != "learns":
                    raise ValueError(f"{where} compares the ladder '{arm}': its measure must be the result learns")
            if isinstance(term, float) and f"{term:g}" in arms:
                raise ValueError(f"{where} has the number {term:g}: '{term:g}' is the arm")
        if self.measures[expected.measure].is_end and not expected.compares_two_arms:
            raise ValueError(f"{where}: whether runs diverge compares two arms, or one with 0")

    @model_validator(mode="after")
    def _known_positions(self) -> Study:
        for name, values in self.paper_scale.ladders.items():
            _check(name, self.ladders, "paper_scale.ladders")
            if len(values) != len(self.ladders[name].values):
                raise ValueError(f"paper_scale.ladders gives '{name}' {len(values)} values, not as many as its rungs")
        numbers = {number for expected in self.expectations for number in expected.grows or expected.falls or ()}
        for number in self.paper_scale.positions:
            if number not in numbers:
                raise ValueError(f"paper_scale.positions names {number:g}, which no trend has")
        for expected, moved in zip(self.expectations, self.at_scale("paper").expectations, strict=True):
            if len(list(moved.terms())) < len(list(expected.terms())):
                raise ValueError(f"paper_scale.positions gives two arms of '{expected.says}' one number")
        return self

    def changes_at(self, scale: ScaleName) -> Scale:
        """Return what a scale changes; nothing at `cpu`."""
        return self.paper_scale if scale == "paper" else Scale()

    def at_scale(self, scale: ScaleName) -> Study:
        """Return the study with the numbers along its trends and ladders that its arms have at a scale."""
        particular = self.changes_at(scale)
        moved = [expected.with_positions(particular.positions) for expected in self.expectations]
        ladders = {
            name: ladder.model_copy(update={"values": particular.ladders.get(name, ladder.values)})
            for name, ladder in self.ladders.items()
        }
        return self.model_copy(update={"expectations": moved, "ladders": ladders})

    def seeds_at(self, scale: ScaleName, asked: int | None = None) -> int:
        """Return how many seeds to use: those asked for, or as many as the study has at a scale."""
        if asked is not None and asked < 1:
            raise RecipeError(f"A study needs at least one seed (got {asked}).")
        if asked is None and len(self.targets) == len(dict(self.all_arms())):
            return max(map(len, self.targets.values()))
        return asked or self.changes_at(scale).seeds or self.seeds

    def all_arms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, changes to the base): the arms listed, the rungs of ladders, then those of the axes."""
        yield from self.arms.items()
        for name, ladder in self.ladders.items():
            yield from ladder.arms(name)
        for values in product(*self.axes.values()) if self.axes else ():
            changes: dict[str, Any] = {}
            for key, value in zip(self.axes, values, strict=True):
                changes = merge(Recipe, changes, nest(key, value))
            yield ", ".join(f"{key}={value}" for key, value in zip(self.axes, values, strict=True)), changes

    @property
    def targets(self) -> dict[str, list[str]]:
        """The arms that are networks to be measured instead of trained, `{target: timm:NAME}`: one name for each seed.

        An arm with one name has it for all seeds.
        """
        written = {arm: changes["target"] for arm, changes in self.arms.items() if "target" in changes}
        return {arm: [names] if isinstance(names, str) else list(names) for arm, names in written.items()}

    def with_targets(self, targets: Mapping[str, str | Sequence[str]]) -> Study:
        """Return the study with targets in place of the trainings of some arms."""
        for arm in targets:
            _check_arm(arm, self.arms, f"A target of {self.claim}")
            if arm in {*self.starts, *self.starts.values()}:
                raise RecipeError(f"The arm '{arm}' of {self.claim} starts from another or is one's start: train it.")
        arms = {**self.arms, **{arm: {"target": names} for arm, names in targets.items()}}
        return self.model_copy(update={"arms": arms})

    def base_recipe(self, overrides: Overrides | None, scale: ScaleName, data: str | Path | None) -> Recipe:
        """Return the recipe of the base, on whose data targets are measured."""
        source = None if data is None else {"source": str(data)}
        return build_recipe(overlay(self.base, self.changes_at(scale).base), overrides, data=source)

    def recipes(
        self, overrides: Overrides | None = None, scale: ScaleName = "cpu", data: str | Path | None = None
    ) -> dict[str, Recipe]:
        """Return the recipe of each arm that is trained, without a seed of its own.

        Args:
            overrides: Changes to every recipe.
            scale: `cpu`, or `paper` for the paper's own setting.
            data: Where the data lies, instead of what the study says; an arm that names data of its own keeps it.
        """
        source = None if data is None else {"source": str(data)}
        particular = self.changes_at(scale)
        base = overlay(self.base, particular.base)
        found = {}
        for name, changes in self.at_scale(scale).all_arms():
            if "target" in changes:
                continue
            try:
                own = particular.arms.get(name, {})
                recipe = build_recipe(
                    overlay(overlay(base, changes), own),
                    overrides,
                    data=None if _name_data(changes) or _name_data(own) else source,
                )
                _refuse_own_keys(recipe)
            except RecipeError as error:
                raise RecipeError(f"The arm '{name}' of {self.claim}: {error}") from None
            self._check_checkpoints(name, recipe)
            found[name] = recipe
        return found

    def _check_checkpoints(self, arm: str, recipe: Recipe) -> None:
        """Raise an error for a measure of weights that an arm does not keep."""
        kept = recipe.checkpoint.keep_epochs
        for name, measure in self.measures.items():
            if measure.checkpoint == "early" and not any(kept):
                advice = "set checkpoint.keep_epochs, as in [0, 3]."
                raise RecipeError(f"The measure '{name}' needs early weights, and '{arm}' keeps none: {advice}")
            if measure.epoch is not None and measure.epoch not in kept:
                advice = f"add {measure.epoch} to checkpoint.keep_epochs."
                weights = f"the weights of epoch {measure.epoch}"
                raise RecipeError(f"The measure '{name}' needs {weights}, and '{arm}' does not keep them: {advice}")


def _name_data(changes: Mapping[str, Any]) -> str | None:
    """Return the data that the changes of an arm name, if they do."""
    data = merge(Recipe, {}, changes).get("data")
    source: str | None = data.get("source") if isinstance(data, Mapping) else None
    return source


def _refuse_own_keys(recipe: Recipe) -> None:
    """Raise an error for keys that a study sets itself."""
    for key in ("seed", "out"):
        if key in recipe.model_fields_set:
            raise RecipeError(
                f"A study sets '{key}' itself: remove it from the recipe. A study's own options are `seeds` and `out`."
            )


def _check_arm(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise RecipeError(f"{where} names the arm '{name}', which does not exist.{did_you_mean(name, known)}")


def _check(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{where} names '{name}', which does not exist.{did_you_mean(name, known)}")


def parse_study(plain: Any, where: str) -> Study:
    """Return the study in plain data; a RecipeError says in one sentence what is wrong with it."""
    if not isinstance(plain, dict):
        raise RecipeError(f"{where} holds {type(plain).__name__}; a study is keys and values.")
    return validate(Study, plain, where=where)
