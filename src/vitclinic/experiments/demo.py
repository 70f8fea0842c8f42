"""The verb `demo`: train a plain and a treated ViT on embedded data, examine both and compare them in one page."""

from __future__ import annotations

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

RECIPE = "shapes"
SHORTER = {"data.source": "shapes:2500", "epochs": 4}
"""Changes to the recipe, so that two trainings and an exam fit into five minutes on two cores."""
TREATMENTS = ("conv_stem", "patch_diversity")
BUDGET = "60s"
"""The time for the probes of both networks."""

Severity = Literal["notice", "healthy"]


@dataclass(frozen=True)
class Claim:
    """The effect of the treatments on one number, as a paper states it."""

    probe: str
    scalar: str
    rises: bool
    what: str
    paper: str

    @property
    def number(self) -> str:
        """The name of the number, as findings give it."""
        return f"{self.probe}.{self.scalar}"


CLAIMS = (
    Claim(
        "token_similarity", "absolute_cosine_last", False, "similarity of the last layer's patches", "gong2021, Fig. 3"
    ),
    Claim("accuracy", "accuracy", True, "accuracy", "wang2022, Table 1; gong2021, Table 1"),
)


@dataclass(frozen=True)
class Comparison:
    """The outcome of the demo."""

    exams: Exams
    """The exams of the plain network and of the treated one."""
    expected: Sequence[Finding]
    """For each claim, a finding that says if the networks differ as the paper says."""
    page: Path


def train_both(out: str | Path, *, callbacks: Sequence[Callback] = ()) -> tuple[Run, Run]:
    """Train the plain network and the treated one in `out`, or continue where that was stopped."""
    plain = _train(Path(out) / "plain", (), callbacks)
    treated = _train(Path(out) / "treated", TREATMENTS, callbacks)
    return plain, treated


def compare(plain: Run, treated: Run, page: str | Path, callbacks: Iterable[Callback] = ()) -> Comparison:
    """Examine both networks and write one page about them."""
    exams = examine([plain, treated], budget=BUDGET, callbacks=callbacks)
    found = judge_claims(exams[0], exams[1])
    networks = [exams[0].view, replace(exams[1].view, findings=[*exams[1].findings, *found])]
    return Comparison(exams, found, write_report(page, networks, title="A plain and a treated vision transformer"))


def _train(path: Path, treatments: Sequence[str], callbacks: Sequence[Callback]) -> Run:
    """Return the run at `path`, which is trained, continued or found ended; a signal is raised as KeyboardInterrupt."""
    if not (path / "recipe.yaml").is_file():
        run = train(RECIPE, SHORTER, treatments=treatments, out=path, callbacks=callbacks)
    elif (run := Run.open(path)).status["status"] not in ("finished", "diverged"):
        run = resume(path, callbacks=callbacks)
    if run.status["status"] == "interrupted":
        raise KeyboardInterrupt
    return run


def judge_claims(plain: Mapping[str, Measurement], treated: Mapping[str, Measurement]) -> list[Finding]:
    """Return a finding for every claim: does the treated network differ from the plain one as the paper says?"""
    evidence = Evidence(treated, reference=plain)
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
        says = f"The {claim.what} is {format_number(before)} without and {format_number(after)} with treatment, {word}."
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
