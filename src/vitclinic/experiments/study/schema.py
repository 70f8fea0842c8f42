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
    expectations:
      - {says: SAM lowers the missing rate, measure: missing_rate, less: [SAM, AdamW]}
    paper_scale: {base: {...}, seeds: 5}

An arm is what it changes of `base`. `axes` is short for all combinations of values of recipe keys, each an arm named
after them (`optimizer.lr=0.001, model.depth=6`). Everything is plain data, checked strictly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic.anatomy import Kind
from vitclinic.probes import Probe, parse_probes
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.overrides import Overrides, merge, nest, overlay

Two = Field(min_length=2, max_length=2)
Number = Annotated[float, Field(allow_inf_nan=False)]
Pair = Annotated[list[str], Two]
Term = str | Number | Pair
"""An arm; a number; or two arms, meaning the first minus the second."""
ScaleName = Literal["cpu", "paper"]
_RESULT = r"diverged|(train\.loss|(val|test)\.(loss|nll|accuracy|accuracy_top5))(@\d+)?"


def _pattern(pattern: str, sentence: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(sentence)
        return text

    return AfterValidator(check)


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


class Measure(Config):
    """A number of one run: from a probe, from its results, or the difference of two other measures."""

    probe: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    scalar: str | None = Field(None, description="which of the probe's scalars")
    value: str | None = Field(None, description="which of the probe's values of each unit")
    units: Kind | None = Field(None, description="only units of this kind, such as msa")
    over_units: Literal["mean", "first", "last", "lower", "upper", "trend", "stage_rise", "stage_step"] = Field(
        "mean",
        description="how units become one number; lower, upper: the mean of that half; trend: Kendall's tau with depth;"
        " stage_rise: a stage's last minus its first, stage_step: a stage's first minus the last of the stage before,"
        " mean over stages",
    )
    checkpoint: Annotated[str, _pattern(r"best|last|early|epoch-\d+", "write best, last, early or epoch-N")] = Field(
        "last", description="whose weights: best, last, epoch-N, or early: the first epoch that is kept after the start"
    )
    limit: Annotated[int, Field(ge=1)] = Field(1000, description="images for probes that do not choose them")
    result: (
        Annotated[str, _pattern(_RESULT, "write diverged, test.accuracy, or val.accuracy@5 for an epoch")] | None
    ) = Field(None, description="as in test.accuracy, val.nll@5 (epoch 5), diverged")
    difference: Annotated[list[str], Two] | None = Field(None, description="of two measures, first minus second")
    magnitude: bool = Field(False, description="drop the sign")
    log: bool = Field(False, description="take log10, so that differences are ratios")
    when_diverged: float | Literal["chance"] | None = Field(
        None, description="the number to use for a run that diverged; chance is 1 / classes"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Measure:
        if sum(source is not None for source in (self.probe, self.result, self.difference)) != 1:
            raise ValueError("give one of probe, result and difference")
        if self.probe is not None and (self.scalar is None) == (self.value is None):
            raise ValueError("give one of scalar and value")
        if self.probe is not None:
            try:
                self.parse_probe()
            except RecipeError as error:
                raise ValueError(str(error)) from None
        return self

    def parse_probe(self) -> Probe:
        """Return the probe with its options."""
        return parse_probes([{str(self.probe): self.options}])[0]

    @property
    def epoch(self) -> int | None:
        """The epoch whose weights the run must keep."""
        return int(self.checkpoint.removeprefix("epoch-")) if self.checkpoint.startswith("epoch-") else None


class Expectation(Config):
    """One comparison that the claim makes: on one measure, with its direction."""

    says: str
    measure: str
    greater: Annotated[list[Term], Two] | None = None
    less: Annotated[list[Term], Two] | None = None
    grows: dict[Number, str | Pair] | None = Field(None, description="{number: arm}, along which the measure grows")
    falls: dict[Number, str | Pair] | None = None
    power: bool = Field(False, description="fit an exponent: log of the measure against log of the number")
    than: Number = Field(0.0, description="the slope that a trend should exceed or stay below")

    @model_validator(mode="after")
    def _one_comparison(self) -> Expectation:
        if sum(kind is not None for kind in (self.greater, self.less, self.grows, self.falls)) != 1:
            raise ValueError("give one of greater, less, grows and falls")
        trend = self.falls if self.grows is None else self.grows
        if trend is not None and (len(trend) < 2 or min(trend) <= 0):
            raise ValueError("a trend needs at least two numbers, all above 0")
        if trend is None and self.than:
            raise ValueError("than is for trends; to compare two arms with a number, write less: [[one, other], 0.01]")
        terms = list(self.terms())
        if trend is None and (terms[0] == terms[1] or all(isinstance(term, float) for term in terms)):
            raise ValueError(
                "compare two different things, one of them an arm (its name, in quotes if that is a number)"
            )
        return self

    @property
    def direction(self) -> Literal[1, -1]:
        """1 if the comparison should be above 0."""
        return 1 if self.greater is not None or self.grows is not None else -1

    @property
    def compares_two_arms(self) -> bool:
        """True if it compares an arm with another one, or with 0."""
        pair = self.greater or self.less or ()
        return bool(pair) and all(isinstance(term, str) or term == 0 for term in pair)

    def with_positions(self, positions: Mapping[float, float]) -> Expectation:
        """Return the same with other numbers for the arms of a trend; those that are not named stay."""
        kind = "grows" if self.grows is not None else "falls"
        trend: dict[float, Term] | None = getattr(self, kind)
        if trend is None:
            return self
        return self.model_copy(update={kind: {positions.get(at, at): term for at, term in trend.items()}})

    def terms(self) -> Iterator[Term]:
        """Yield what is compared."""
        yield from self.greater or self.less or ()
        yield from (self.grows or self.falls or {}).values()


class Scale(Config):
    """The changes that another scale makes to the base, to arms and to the number of seeds."""

    base: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    positions: dict[float, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="numbers along the study's trends that differ at this scale: {old: new}",
    )
    seeds: Annotated[int, Field(ge=1)] | None = None
    images: Annotated[int, Field(ge=1)] | None = Field(None, description="for a dry run; the data's own unless given")
    classes: Annotated[int, Field(ge=1)] | None = Field(None, description="likewise for a dry run")
    size: Annotated[int, Field(ge=1)] | None = Field(None, description="pixels a side, likewise")


class Study(Config):
    """A claim as an experiment; `open_study` reads one by name or from a file, `study` conducts it."""

    claim: Annotated[
        str,
        _pattern(r"\w[\w.-]*", "write a short name: the result's file is named after it"),
        AfterValidator(_check_name),
    ]
    title: str
    paper: str
    source: str = Field(description="figure or table, and the paper's numbers")
    base: dict[str, Any]
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    seeds: Annotated[int, Field(ge=1)] = 5
    measures: dict[str, Measure]
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
        if not arms:
            raise ValueError("give arms or axes")
        names = list(self.measures)
        for name, measure in self.measures.items():
            for other in measure.difference or ():
                _check(other, self.measures, f"the measure '{name}'")
                if self.measures[other].difference and names.index(other) >= names.index(name):
                    raise ValueError(f"the measure '{name}' is a difference of '{other}', which must be listed before")
        for expected in self.expectations:
            _check(expected.measure, self.measures, f"the expectation '{expected.says}'")
            for term in expected.terms():
                for arm in (term,) if isinstance(term, str) else term if isinstance(term, list) else ():
                    _check(arm, arms, f"the expectation '{expected.says}'")
                if isinstance(term, float) and f"{term:g}" in arms:
                    raise ValueError(
                        f"the expectation '{expected.says}' has the number {term:g}: '{term:g}' is the arm"
                    )
            if self.measures[expected.measure].result == "diverged" and not expected.compares_two_arms:
                raise ValueError(
                    f"the expectation '{expected.says}': whether runs diverge compares two arms, or one with 0"
                )
        for arm in self.paper_scale.arms:
            _check(arm, arms, "paper_scale")
        return self

    @model_validator(mode="after")
    def _known_positions(self) -> Study:
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
        """Return the study with the numbers along its trends that its arms have at a scale."""
        positions = self.changes_at(scale).positions
        moved = [expected.with_positions(positions) for expected in self.expectations]
        return self.model_copy(update={"expectations": moved})

    def seeds_at(self, scale: ScaleName, asked: int | None = None) -> int:
        """Return how many seeds to use: those asked for, or as many as the study has at a scale."""
        if asked is not None and asked < 1:
            raise RecipeError(f"A study needs at least one seed (got {asked}).")
        return asked or self.changes_at(scale).seeds or self.seeds

    def all_arms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, changes to the base): the arms listed, then those of the axes."""
        yield from self.arms.items()
        for values in product(*self.axes.values()) if self.axes else ():
            changes: dict[str, Any] = {}
            for key, value in zip(self.axes, values, strict=True):
                changes = merge(Recipe, changes, nest(key, value))
            yield ", ".join(f"{key}={value}" for key, value in zip(self.axes, values, strict=True)), changes

    def recipes(
        self, overrides: Overrides | None = None, scale: ScaleName = "cpu", data: str | Path | None = None
    ) -> dict[str, Recipe]:
        """Return the recipe of each arm, without a seed of its own.

        Args:
            overrides: Changes to every recipe.
            scale: `cpu`, or `paper` for the paper's own setting.
            data: Where the data lies, instead of what the study says.
        """
        source = None if data is None else {"source": str(data)}
        particular = self.changes_at(scale)
        base = overlay(self.base, particular.base)
        found = {}
        for name, changes in self.all_arms():
            try:
                arm = overlay(overlay(base, changes), particular.arms.get(name, {}))
                recipe = build_recipe(arm, overrides, data=source)
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


def _refuse_own_keys(recipe: Recipe) -> None:
    """Raise an error for keys that a study sets itself."""
    for key in ("seed", "out"):
        if key in recipe.model_fields_set:
            raise RecipeError(
                f"A study sets '{key}' itself: remove it from the recipe. A study's own options are `seeds` and `out`."
            )


def _check(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{where} names '{name}', which does not exist.{did_you_mean(name, known)}")


def parse_study(plain: Any, where: str) -> Study:
    """Return the study in plain data; a RecipeError says in one sentence what is wrong with it."""
    if not isinstance(plain, dict):
        raise RecipeError(f"{where} holds {type(plain).__name__}; a study is keys and values.")
    return validate(Study, plain, where=where)
