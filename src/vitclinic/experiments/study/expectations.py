"""Measures and expectations of a study, and the conditions on its runs under which the claim can be tested.

A measure is one number of one run. An expectation compares arms by a measure. A condition says where the claim lives:
a study whose runs do not meet it is *not testable here*, whatever the comparisons say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from vitclinic._core.config import Config
from vitclinic._core.errors import RecipeError
from vitclinic.anatomy import Kind
from vitclinic.probes import Probe, parse_probes
from vitclinic.probes.numbers import find_typo

Two = Field(min_length=2, max_length=2)
Number = Annotated[float, Field(allow_inf_nan=False)]
Pair = Annotated[list[str], Two]
Term = str | Number | Pair
"""An arm; a number; or two arms, meaning the first minus the second."""
_WEIGHTS = r"best|last|early|epoch-\d+"
ENDS = ("diverged", "stalled", "learns")
"""Results that say how a run ended, 1 or 0: it diverged, it did not and learned nothing, or neither."""
_RESULT = (
    rf"{'|'.join(ENDS)}|train\.images_per_second|(train\.loss|(val|test)\.(loss|nll|accuracy|accuracy_top5))(@\d+)?"
)


def match_pattern(pattern: str, sentence: str) -> AfterValidator:
    """Return a validator that refuses a text that does not match the pattern, with a sentence."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(sentence)
        return text

    return AfterValidator(check)


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
    skip: Annotated[int, Field(ge=0)] = Field(0, description="how many of the first units to leave out")
    checkpoint: Annotated[str, match_pattern(_WEIGHTS, "write best, last, early or epoch-N")] = Field(
        "last", description="whose weights: best, last, epoch-N, or early: the first epoch that is kept after the start"
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(
        1000, description="images for probes that do not choose them; null for all of the split"
    )
    result: (
        Annotated[str, match_pattern(_RESULT, "write diverged, stalled, learns, test.accuracy, or val.accuracy@5")]
        | None
    ) = Field(None, description="as in test.accuracy, val.nll@5 (epoch 5), learns")
    difference: Annotated[list[str], Two] | None = Field(None, description="two measures, first minus second")
    magnitude: bool = Field(False, description="drop the sign; of each unit's value, where units become one number")
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
                probe = self.parse_probe()
            except RecipeError as error:
                raise ValueError(str(error)) from None
            if typo := find_typo(type(probe), str(self.scalar or self.value)):
                raise ValueError(typo)
        return self

    def parse_probe(self) -> Probe:
        """Return the probe with its options."""
        return parse_probes([{str(self.probe): self.options}])[0]

    @property
    def is_end(self) -> bool:
        """True if it says how a run ended, 1 or 0."""
        return self.result in ENDS

    @property
    def is_ordinal(self) -> bool:
        """True if its numbers are few and often the same, so that they are judged by their signs (`verdicts`)."""
        return self.is_end or self.over_units == "trend"

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
    effect: Number | None = Field(None, description="what the paper found, in the measure's unit, for the plan's power")
    spread: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="standard deviation of this comparison over seeds, as first runs have it; for the plan"
    )

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


class Condition(Config):
    """A condition on every run of some arms: outside of it the claim is not testable here.

    Example:
        >>> Condition(says="nothing is interpolated", measure="train_nll", least=0.05).arms is None
        True
    """

    says: str
    measure: str
    arms: Annotated[list[str], Field(min_length=1)] | None = Field(None, description="which arms; all unless given")
    least: Number | None = Field(None, description="the smallest number allowed")
    most: Number | None = Field(None, description="the largest number allowed")
    match: Pair | None = Field(None, description="two arms whose numbers differ by a factor of `within` at most")
    within: Annotated[float, Field(gt=1)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Condition:
        bounded = self.least is not None or self.most is not None
        if bounded == (self.match is not None):
            raise ValueError("give bounds (least, most) or two arms to match, and not both")
        if (self.match is None) != (self.within is None):
            raise ValueError("match and within go together, as in match: [SAM, plain], within: 2")
        if self.match is not None and self.arms is not None:
            raise ValueError("match names its arms itself: remove arms")
        return self

    def list_arms(self) -> list[str]:
        """Return the arms that it names."""
        return self.match or self.arms or []
