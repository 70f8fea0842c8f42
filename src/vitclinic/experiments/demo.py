"""The verb `demo`: train a plain ViT and the recommended recipe for the same time, and compare them in one page."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vitclinic._core.callback import Callback
from vitclinic._core.records import Finding, Measurement, Scalar
from vitclinic.exam import Exams, examine
from vitclinic.exam.findings.rule import Evidence, format_number, high, low
from vitclinic.reports.page import write_report
from vitclinic.training import Run, resume, train

RECIPES = ("plain", "small")
"""The shipped recipes of the plain network and of its cure."""
LENGTH = {"data.source": "shapes:2500", "max_time": "40s", "validation": "25%", "checkpoint": "25%"}
"""Changes to both, so that two trainings and an exam fit into five minutes on two cores."""
BUDGET = "80s"
"""The time for the probes of both networks."""

Severity = Literal["notice", "healthy"]


@dataclass(frozen=True)
class Claim:
    """The effect of the cure on one number, as papers state it of its ingredients."""

    probe: str
    scalar: str
    rises: bool
    what: str
    paper: str

    @property
    def number(self) -> str:
        """The name of the number, as findings give it."""
        return f"{self.probe}.{self.scalar}"


CLAIMS = (Claim("accuracy", "accuracy", True, "accuracy", "wang2022, Table 1; park2022, Fig. 12"),)


@dataclass(frozen=True)
class DemoResult:
    """The outcome of the demo."""

    exams: Exams
    """The exams of the plain network and of the cured one."""
    expected: Sequence[Finding]
    """For each claim, a finding that says if the networks differ as the paper says."""
    headline: str
    """What the cure did, in one sentence."""
    page: Path


def train_both(out: str | Path, *, callbacks: Sequence[Callback] = ()) -> tuple[Run, Run]:
    """Train both networks in `out`, or continue where that was stopped."""
    plain, cured = (_train(Path(out) / Path(recipe).stem, recipe, callbacks) for recipe in RECIPES)
    return plain, cured


def compare(plain: Run, cured: Run, page: str | Path, callbacks: Iterable[Callback] = ()) -> DemoResult:
    """Examine both networks and write one page about them, which opens with what the cure did."""
    exams = examine([plain, cured], budget=BUDGET, callbacks=callbacks)
    found = judge_claims(exams[0], exams[1])
    headline = _headline(plain, cured)
    networks = [exams[0].view, replace(exams[1].view, findings=[*found, *exams[1].findings])]
    return DemoResult(exams, found, headline, write_report(page, networks, title=headline))


def _headline(plain: Run, cured: Run) -> str:
    before, after = (run.results.get("test", {}).get("accuracy") for run in (plain, cured))
    if before is None or after is None:
        return "A plain vision transformer, and one with the recipe small"
    time = f"in the same {plain.recipe.max_time}" if plain.recipe.max_time else "in as many steps"
    return f"{before:.0%} with a plain ViT, {after:.0%} with the recipe {Path(RECIPES[1]).stem}: test accuracy {time}"


def _train(path: Path, recipe: str, callbacks: Sequence[Callback]) -> Run:
    """Return the run at `path`, which is trained, continued or found ended; a signal is raised as KeyboardInterrupt."""
    if not (path / "recipe.yaml").is_file():
        run = train(recipe, LENGTH, out=path, callbacks=callbacks)
    elif (run := Run.open(path)).status["status"] not in ("finished", "diverged"):
        run = resume(path, callbacks=callbacks)
    if run.status["status"] == "interrupted":
        raise KeyboardInterrupt(run.status.get("signal", signal.SIGINT))
    return run


def judge_claims(plain: Mapping[str, Measurement], cured: Mapping[str, Measurement]) -> list[Finding]:
    """Return a finding for every claim: does the cured network differ from the plain one as the papers say?"""
    evidence = Evidence(cured, reference=plain)
    return [_judge(claim, evidence.theirs(claim.number), evidence.number(claim.number)) for claim in CLAIMS]


def _judge(claim: Claim, before: Scalar | None, after: Scalar | None) -> Finding:
    severity: Severity
    numbers: dict[str, Scalar] = {}
    if before is None or after is None:
        title, severity = f"No comparison of {claim.what}", "notice"
        says = f"The {claim.what} was not measured in the same way for both networks, so {claim.paper} is not tested."
    else:
        title, severity, word = _describe_change(claim, before, after)
        numbers = {claim.number: after, f"plain {claim.number}": before}
        says = f"The {claim.what} is {format_number(before)} plain and {format_number(after)} cured, {word}."
    return Finding(
        rule="as_published",
        title=title,
        severity=severity,
        statement=says,
        numbers=numbers,
        threshold=f"The two intervals do not overlap, and it {'rises' if claim.rises else 'falls'} ({claim.paper}).",
        basis="reference network",
    )


def _describe_change(claim: Claim, before: Scalar, after: Scalar) -> tuple[str, Severity, str]:
    """Return title, severity and the end of the sentence."""
    rises, falls = low(after) > high(before), high(after) < low(before)
    if not rises and not falls:
        return f"No clear change in {claim.what}", "notice", "and the two intervals overlap"
    if rises == claim.rises:
        return f"{'Higher' if rises else 'Lower'} {claim.what}, as published", "healthy", f"as {claim.paper} says"
    return f"{claim.what.capitalize()} changes against the paper", "notice", f"against what {claim.paper} says"
