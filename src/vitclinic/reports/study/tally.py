"""The tally: every claim with its results, as rows for the index of studies and for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitclinic._core.time import format_duration
from vitclinic.reports.embedding import Drawings
from vitclinic.reports.frame import fill_template, write_page
from vitclinic.reports.study.page import SEVERITIES, view_comparison
from vitclinic.reports.study.result import PAPERS, WORDS, StoredResult

EXPLORATORY, CHANGED, NOT_RUN = "exploratory", "changed", "not run yet"
OUTCOMES = (*WORDS, EXPLORATORY, CHANGED, NOT_RUN)


@dataclass(frozen=True)
class Claim:
    """A claim of the catalogue."""

    name: str
    title: str
    paper: str
    source: str


@dataclass(frozen=True)
class Entry:
    """A line of the tally: a claim with one of its results, or without."""

    claim: Claim
    result: StoredResult | None = None
    page: str = ""
    """The result's own page, as a link from the index."""
    changed: str = ""
    """How the experiment differs from the catalogue's: it then says nothing of the claim."""

    @property
    def outcome(self) -> str:
        """One of OUTCOMES: with too few seeds for a verdict a result counts as exploratory, whatever it says."""
        if self.result is None:
            return NOT_RUN
        if self.changed:
            return CHANGED
        return EXPLORATORY if self.result.exploratory else self.result.word


def list_entries(
    claims: Sequence[Claim],
    results: Mapping[str, StoredResult],
    changed: Callable[[StoredResult], str] = lambda result: "",
) -> list[Entry]:
    """Return the claims in their order with their results, by the names of their files, then results of other studies.

    `changed` says how a result's experiment differs from the claim's own, if it does.
    """
    known = {claim.name for claim in claims}
    found = []
    for claim in claims:
        own = [(name, result) for name, result in results.items() if result.claim == claim.name]
        found += [Entry(claim, result, f"{name}.html", changed(result)) for name, result in own] or [Entry(claim)]
    for name, result in results.items():
        if result.claim not in known:
            of = Claim(result.claim, result.title, result.paper, result.source)
            found.append(Entry(of, result, f"{name}.html"))
    return found


def count_outcomes(found: Sequence[Entry]) -> dict[str, int]:
    """Count the outcomes; changed studies only if there are any."""
    counted = Counter(entry.outcome for entry in found)
    return {outcome: counted[outcome] for outcome in OUTCOMES if outcome != CHANGED or counted[outcome]}


def group_by_paper(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each paper, the papers in the order of their first entry."""
    groups: dict[str, list[Entry]] = {}
    for entry in found:
        groups.setdefault(PAPERS.get(entry.claim.paper, entry.claim.paper), []).append(entry)
    return groups


def write_index(path: str | Path, found: Sequence[Entry], title: str | None = None) -> Path:
    """Write the index of all studies."""
    return write_page(path, render_index(found, title))


def render_index(found: Sequence[Entry], title: str | None = None) -> str:
    """Return the index as HTML."""
    groups = [
        {"name": paper, "id": f"paper-{place}", "rows": [_row(entry) for entry in entries]}
        for place, (paper, entries) in enumerate(group_by_paper(found).items(), 1)
    ]
    results = [entry.result for entry in found if entry.result is not None]
    return fill_template(
        "studies.html",
        Drawings(images=True),
        title=title or "The papers' claims, and what was found",
        claims=len({entry.claim.name for entry in found}),
        results=len(results),
        cost=format_duration(sum(result.seconds for result in results)),
        counts=[(outcome, SEVERITIES.get(outcome, "plain"), count) for outcome, count in count_outcomes(found).items()],
        groups=groups,
    )


def _row(entry: Entry) -> dict[str, Any]:
    result = entry.result
    row = {
        "claim": entry.claim,
        "page": entry.page,
        "result": result,
        "outcome": entry.outcome,
        "changed": entry.changed,
    }
    if result is None:
        return row
    return {
        **row,
        "severity": SEVERITIES[result.word],
        "cost": format_duration(result.seconds),
        "comparisons": [view_comparison(one) for one in result.comparisons],
    }
