"""The page of a study, and the index of all: every claim with its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitclinic._core.time import format_duration
from vitclinic.reports.figure import format_number, network_colour
from vitclinic.reports.figures.study import comparisons_figure, measure_figure
from vitclinic.reports.frame import Drawings, fill_template, write_page
from vitclinic.reports.page import letter
from vitclinic.reports.study_result import (
    ENDED,
    PAPERS,
    WORDS,
    ArmNumbers,
    StoredComparison,
    StoredResult,
    parse_result,
)

POOL = "pool"
"""Where the runs are, beside the page."""

SEVERITIES = {"reproduced": "healthy", "not reproduced": "problem", "undecided": "notice", "not testable here": "plain"}
"""The look of a verdict, as that of findings."""
STATUS_SEVERITIES = {"as claimed": "healthy", "opposite": "problem", "undecided": "notice"}


def write_study(path: str | Path, stored: Mapping[str, Any]) -> Path:
    """Write the page of a result, given as what is stored of it."""
    return write_page(path, render_study(parse_result(stored)))


def render_study(result: StoredResult) -> str:
    """Return the page as HTML; names are shown as text."""
    drawings = Drawings(images=True)
    return fill_template(
        "study.html",
        drawings,
        title=f"{result.claim}: {result.title}",
        result=result,
        severity=SEVERITIES[result.word],
        statement=state_result(result),
        facts=_facts(result),
        comparisons=[view_comparison(one) for one in result.comparisons],
        conditions=result.conditions,
        measures=list(result.measures),
        arms=[_arm(result, place, arm) for place, arm in enumerate(result.arms)],
        failures=_failures(result),
        without=_without_numbers(result),
        compared=drawings.view(comparisons_figure(result)),
        measured=[drawings.view(measure_figure(result, name, at)) for at, name in enumerate(result.measures, 1)],
    )


def state_result(result: StoredResult) -> str:
    """Return what the verdict rests on, in a sentence or two."""
    failed = [one for one in result.conditions if not one.holds]
    if failed:
        broken = "; ".join(f"{one.says} ({one.found})" for one in failed)
        return f"Outside of the regime in which the claim can be tested. What does not hold: {broken}."
    count = len(result.comparisons)
    claimed, opposite = (sum(one.status == word for one in result.comparisons) for word in ("as claimed", "opposite"))
    text = f"{claimed} of {count} comparison{'s' * (count != 1)} as claimed"
    text += f", {opposite} opposite." if opposite else "."
    if result.exploratory:
        fewest = min(one.seeds for one in result.comparisons)
        text += f" Exploratory: {fewest} seed{'s' * (fewest != 1)} with all numbers, and a verdict takes five."
    return text


def view_comparison(one: StoredComparison) -> dict[str, Any]:
    """Return one comparison as tables show it."""
    return {
        "says": one.says,
        "measure": one.measure,
        "terms": one.terms,
        "mean": format_signed(one.mean),
        "p": "–" if math.isnan(one.p) else f"{one.p:.2g}{' by signs' * (one.test == 'signs')}",
        "interval": "–" if math.isnan(one.low) else f"{format_number(one.low)} to {format_number(one.high)}",
        "status": one.status,
        "severity": STATUS_SEVERITIES[one.status],
        "seeds": one.seeds,
        "missing": one.missing,
    }


def format_signed(value: float) -> str:
    """Return a difference with its sign.

    Example:
        >>> format_signed(0.25), format_signed(-0.5), format_signed(math.nan)
        ('+0.25', '-0.5', '–')
    """
    return "–" if math.isnan(value) else f"{'+' * (value > 0)}{format_number(value)}"


def _facts(result: StoredResult) -> dict[str, str]:
    runs = {run for by_seed in result.runs.values() for run in by_seed.values() if run}
    facts = {
        "claim": result.title,
        "paper": f"{result.paper}, {result.source}",
        "scale": "the paper's own" if result.scale == "paper" else "CPU",
        "note": result.note if result.scale != "paper" else "",
        "data": ", ".join(result.data),
        "runs": f"{len(runs)}: {len(result.arms)} arms, {len(result.seeds)} seeds",
        "cost": f"{format_duration(result.seconds)} of training, by the runs' own record",
        "date": result.date,
    }
    return {key: value for key, value in facts.items() if value}


def _arm(result: StoredResult, place: int, arm: str) -> dict[str, Any]:
    statuses = result.statuses[arm]
    return {
        "name": arm,
        "letter": letter(place),
        "colour": network_colour(place),
        "cells": [_cell(arms[arm]) if arm in arms else None for arms in result.measures.values()],
        "runs": [_run(result.runs[arm].get(seed, ""), statuses.get(seed)) for seed in result.seeds],
    }


def _cell(arm: ArmNumbers) -> dict[str, Any]:
    value = (
        f"{math.fsum(arm.known):.0f} of {len(arm.known)}" if arm.share else format_number(arm.mean) if arm.known else ""
    )
    ends = arm.interval
    return {
        "value": value if arm.known else "",
        "interval": "" if ends is None else f"{format_number(ends[0])} to {format_number(ends[1])}",
        "lacking": len(arm.numbers) - len(arm.known),
    }


def _run(folder: str, status: str | None) -> dict[str, str]:
    """Return a run's link, if it has a folder, and its status in one word; reasons of failures are listed below."""
    return {
        "link": f"{POOL}/{quote(folder, safe='')}/" if folder else "",
        "folder": folder,
        "status": "not run" if status is None else status if status in ENDED else "failed",
    }


def _failures(result: StoredResult) -> list[tuple[str, str, str]]:
    """Return (arm, seeds, reason), once for all seeds that failed alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for arm, by_seed in result.statuses.items():
        for seed, status in by_seed.items():
            if status not in ENDED:
                alike.setdefault((arm, status), []).append(str(seed))
    return [(arm, ", ".join(seeds), reason) for (arm, reason), seeds in alike.items()]


def _without_numbers(result: StoredResult) -> list[tuple[str, str, str, str]]:
    """Return (measure, arm, seeds, reason) of what has no number."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for arm, by_seed in result.missing.items():
        for seed, reasons in by_seed.items():
            for measure, reason in reasons.items():
                alike.setdefault((measure, arm, reason), []).append(str(seed))
    return [(measure, arm, ", ".join(seeds), reason) for (measure, arm, reason), seeds in alike.items()]


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
