"""The stored result of a study, read as pages need it; also one that an earlier version stored."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitclinic._core.errors import DamagedFileError, RunError
from vitclinic._core.io import is_unchanged, read_record
from vitclinic._core.statistics import share_interval, t_interval

SCHEMA = 1
Word = Literal["reproduced", "not reproduced", "undecided", "not testable here"]
Status = Literal["as claimed", "opposite", "undecided"]
WORDS: tuple[Word, ...] = get_args(Word)
STATUSES: tuple[Status, ...] = get_args(Status)
EXPLORATORY = " (exploratory)"
ENDED = ("finished", "diverged", "measured")

PAPERS = {
    "park2022": "Park and Kim 2022",
    "chen2022": "Chen, Hsieh and Gong 2022",
    "wang2022": "Wang et al. 2022",
    "hyeonwoo2023": "Hyeon-Woo et al. 2023",
    "gong2021": "Gong et al. 2021",
}


@dataclass(frozen=True)
class Comparison:
    """The outcome of one expectation of a study."""

    says: str
    measure: str
    direction: Literal[1, -1]
    """1 if the claim says that the number is above 0, -1 if below."""
    status: Status
    mean: float
    low: float
    high: float
    """At the corrected confidence; NaN for fewer than two seeds, or if all have the same number."""
    seeds: int
    missing: int
    """Seeds without a number, such as those in which a run diverged before it could be measured."""
    numbers: Mapping[int, float]
    """By seed; NaN where there is none, empty in results that were stored without them."""
    p: float = math.nan
    """Two-sided; NaN if nothing could be tested, and in results that were stored without it."""
    test: Literal["t", "signs"] = "t"
    """Student's, or the permutation of signs, of numbers that are few and often the same."""


@dataclass(frozen=True)
class Checked:
    """The outcome of one condition of a study."""

    says: str
    holds: bool
    found: str
    """The number that breaks it, or is nearest to doing so, with its arm and seed."""


@dataclass(frozen=True, kw_only=True)
class StoredComparison(Comparison):
    """A comparison with what its expectation says about its number."""

    terms: str
    """The number in words: `SAM − AdamW`, or for a trend `slope`."""
    than: float
    """The limit that the number should be above (direction 1) or below (-1)."""


@dataclass(frozen=True)
class ArmNumbers:
    """The numbers that one arm has for one measure."""

    numbers: Mapping[int, float]
    """By seed; NaN where there is none."""
    share: bool
    """True if the numbers are 0 or 1, such as for runs that diverged or not."""

    @property
    def known(self) -> list[float]:
        """The numbers that are there."""
        return [number for number in self.numbers.values() if not math.isnan(number)]

    @property
    def mean(self) -> float:
        return math.fsum(self.known) / len(self.known) if self.known else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean: Wilson's for a share, Student's for any other."""
        if self.share:
            return share_interval(round(math.fsum(self.known)), len(self.known)) if self.known else None
        return t_interval(self.known)


@dataclass(frozen=True)
class StoredResult:
    """A result as it lies on disk, with its numbers as numbers again."""

    claim: str
    named: str
    """The name of the study in a command: its claim, or that of its file."""
    title: str
    paper: str
    source: str
    note: str
    blind: bool
    """True if its expectations were fixed before any run."""
    scale: str
    data: tuple[str, ...]
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    word: str
    exploratory: bool
    comparisons: tuple[StoredComparison, ...]
    conditions: tuple[Checked, ...]
    """Of its regime; those that do not hold make it not testable."""
    measures: Mapping[str, Mapping[str, ArmNumbers]]
    """measure -> arm -> its numbers."""
    missing: Mapping[str, Mapping[int, Mapping[str, str]]]
    runs: Mapping[str, Mapping[int, str]]
    statuses: Mapping[str, Mapping[int, str]]
    seconds: float
    date: str
    design: Mapping[str, Any]
    """The study as it was stored."""

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.runs)

    @property
    def verdict(self) -> str:
        """In full, as it is stored."""
        return f"{self.word}{EXPLORATORY}" if self.exploratory else self.word

    @property
    def confidence(self) -> float:
        """The confidence of each comparison in percent, so that all hold together at 95%."""
        return 100 - 5 / len(self.comparisons)

    @property
    def command(self) -> str:
        """The command that leads here; where the data and a study's file lie is not stored."""
        data = ["--data", *self.data] if len(self.data) == 1 else []  # arms with data of their own had no --data
        scale = ["--scale", "paper"] if self.scale == "paper" else []
        seeds = ["--seeds", str(len(self.seeds))]
        return shlex.join(["vitclinic", "study", self.named, *data, *scale, *seeds, *self.words])


def read_result(path: Path) -> StoredResult:
    """Return the result in a file.

    Raises:
        RunError: The file holds something else.
    """
    try:
        plain = read_record(path, {}, "run the study again")
        if not is_unchanged(plain):
            raise RunError(f"'{path}' was changed since it was written; run the study again.")
        found = parse_result(plain)
        if not set(found.arms) <= set(found.statuses):  # else a page would look for them in vain
            raise LookupError
        return found
    except (DamagedFileError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"'{path}' is not the result of a study, or one that this version cannot read.") from error


def parse_result(plain: Mapping[str, Any]) -> StoredResult:
    """Return the result in what was stored."""
    study, verdict = plain["study"], str(plain["verdict"])
    word = verdict.removesuffix(EXPLORATORY)
    if plain["schema"] != SCHEMA or word not in WORDS:
        raise ValueError(f"schema {plain['schema']}, verdict {verdict}")
    return StoredResult(
        claim=str(plain["claim"]),
        named=str(plain.get("named", plain["claim"])),  # not in results of earlier versions
        title=str(study["title"]),
        paper=PAPERS.get(study["paper"], str(study["paper"])),
        source=str(study["source"]),
        note=str(study.get("note") or ""),
        blind=bool(study.get("blind", True)),
        scale=str(plain["scale"]),
        data=tuple(plain["data"]),
        words=tuple(plain["words"]),
        seeds=tuple(plain["seeds"]),
        word=word,
        exploratory=verdict != word,
        comparisons=tuple(map(_parse_comparison, plain["comparisons"], study["expectations"])),
        conditions=tuple(
            Checked(str(one["says"]), bool(one["holds"]), str(one["found"])) for one in plain.get("conditions", ())
        ),
        measures=_parse_measures(study["measures"], plain["values"]),
        missing={arm: _by_seed(seeds) for arm, seeds in plain["missing"].items()},
        runs={arm: _by_seed(seeds) for arm, seeds in plain["runs"].items()},
        statuses={arm: _by_seed(seeds) for arm, seeds in plain["statuses"].items()},
        seconds=float(plain["seconds"]),
        date=str(plain["date"]),
        design=study,
    )


def _parse_comparison(plain: Mapping[str, Any], expected: Mapping[str, Any]) -> StoredComparison:
    if plain["status"] not in STATUSES:
        raise ValueError(plain["status"])
    return StoredComparison(
        says=str(plain["says"]),
        measure=str(plain["measure"]),
        terms=_describe_terms(expected),
        direction=1 if plain["direction"] > 0 else -1,
        than=float(expected.get("than", 0.0)),
        status=plain["status"],
        mean=float(plain["mean"]),
        low=float(plain["low"]),
        high=float(plain["high"]),
        seeds=int(plain["seeds"]),
        missing=int(plain["missing"]),
        numbers={int(seed): float(number) for seed, number in plain.get("numbers", {}).items()},
        p=float(plain.get("p", math.nan)),
        test="signs" if plain.get("test") == "signs" else "t",
    )


def _describe_terms(expected: Mapping[str, Any]) -> str:
    pair: Sequence[Any] | None = expected.get("greater") or expected.get("less")
    if pair is None:
        return "exponent" if expected.get("power") else "slope, for each doubling"
    first, second = (" − ".join(term) if isinstance(term, list) else str(term) for term in pair)
    if isinstance(pair[1], list):
        second = f"({second})"
    return first if pair[1] == 0 else f"{first} − {second}"


def _parse_measures(measures: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[str, ArmNumbers]]:
    return {
        f"log10 {name}" if measure.get("log") else name: {
            arm: ArmNumbers(
                {int(seed): float(numbers.get(name, math.nan)) for seed, numbers in by_seed.items()},
                share=measure.get("result") in ("diverged", "stalled", "learns"),
            )
            for arm, by_seed in values.items()
        }
        for name, measure in measures.items()
    }


def _by_seed(plain: Mapping[str, Any]) -> dict[int, Any]:
    return {int(seed): value for seed, value in plain.items()}
