"""The verb `demo`: a plain ViT and a treated one on embedded data, trained, examined and compared in one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitclinic.clinic import Exams, examine
from vitclinic.clinic.watching import Watcher
from vitclinic.data.cache import Progress
from vitclinic.finding import Finding
from vitclinic.measurement import Measurement
from vitclinic.reports.page import write_report
from vitclinic.training import Observer, Run, resume, train

RECIPE = "shapes"
TREATMENTS = ("conv_stem", "patch_diversity")
BUDGET = "75s"
"""For the probes of both networks."""


@dataclass(frozen=True)
class Claim:
    """What a paper says that the treatments do to a number of the network."""

    probe: str
    scalar: str
    rises: bool
    what: str
    paper: str


CLAIMS = (
    Claim(
        "token_similarity", "absolute_cosine_last", False, "similarity of the last layer's patches", "gong2021, Fig. 3"
    ),
    Claim("accuracy", "accuracy", True, "accuracy", "wang2022, Table 1; gong2021, Table 1"),
)


@dataclass(frozen=True)
class Compared:
    """What the demo has found out."""

    exams: Exams
    """Of the plain network and the treated one."""
    expected: Sequence[Finding]
    """Whether they differ as the papers say."""
    page: Path


def train_both(
    out: str | Path,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress = lambda what, done, total: None,
) -> tuple[Run, Run]:
    """The plain network and the treated one in `out`; goes on where it was stopped."""
    plain = _trained(Path(out) / "plain", [], observers, progress)
    treated = _trained(Path(out) / "treated", [f"treatments=[{', '.join(TREATMENTS)}]"], observers, progress)
    return plain, treated


def compare(plain: Run, treated: Run, page: str | Path, watcher: Watcher | None = None) -> Compared:
    """Examine both networks, and write one page about them."""
    exams = examine([plain, treated], budget=BUDGET, watcher=watcher)
    found = expected(exams[0], exams[1])
    networks = [exams[0].examined, replace(exams[1].examined, findings=[*exams[1].findings, *found])]
    return Compared(exams, found, write_report(page, networks, title="A plain and a treated vision transformer"))


def _trained(path: Path, words: list[str], observers: Sequence[Observer], progress: Progress) -> Run:
    """The run at `path`: as it ended, gone on with, or new. A signal that stopped it is raised."""
    if not (path / "recipe.yaml").is_file():
        run = train(RECIPE, f"out={path}", *words, observers=observers, progress=progress)
    elif (run := Run.open(path)).status["status"] not in ("finished", "diverged"):
        run = resume(path, observers=observers, progress=progress)
    if run.status["status"] == "interrupted":
        raise KeyboardInterrupt
    return run


def expected(plain: Mapping[str, Measurement], treated: Mapping[str, Measurement]) -> list[Finding]:
    """Whether the treated network differs from the plain one as the papers say, of every claim that was measured."""
    return [found for claim in CLAIMS if (found := _held(claim, plain, treated)) is not None]


def _held(claim: Claim, plain: Mapping[str, Measurement], treated: Mapping[str, Measurement]) -> Finding | None:
    pair = [exam[claim.probe].scalars.get(claim.scalar) if claim.probe in exam else None for exam in (plain, treated)]
    if pair[0] is None or pair[1] is None:
        return None
    before, after = pair[0], pair[1]
    change = after.value - before.value
    ends = [(s.value if s.low is None else s.low, s.value if s.high is None else s.high) for s in (before, after)]
    apart = ends[1][0] > ends[0][1] or ends[1][1] < ends[0][0]
    if not apart:
        word, title = "which is within the intervals", f"No clear change in {claim.what}"
    elif (change > 0) == claim.rises:
        word, title = f"as {claim.paper} says", f"{'Higher' if claim.rises else 'Lower'} {claim.what}, as published"
    else:
        word, title = f"against what {claim.paper} says", f"{claim.what.capitalize()} changes against the paper"
    return Finding(
        rule="as_published",
        title=title,
        severity="healthy" if title.endswith("as published") else "notice",
        statement=f"The {claim.what} is {before.value:.3f} without and {after.value:.3f} with treatment, {word}.",
        numbers={f"{claim.probe}.{claim.scalar}": after, f"plain {claim.probe}.{claim.scalar}": before},
        threshold=f"The two intervals do not overlap, and it {'rises' if claim.rises else 'falls'} ({claim.paper}).",
        basis="reference network",
    )
