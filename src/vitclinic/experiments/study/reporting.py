"""Pages of all studies of a folder from what is stored there, with the tally of the whole catalogue."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

from vitclinic._core.errors import RecipeError, RunError
from vitclinic.experiments.study.catalogue import open_study, shipped_studies
from vitclinic.experiments.study.study import parse_study
from vitclinic.reports.frame import write_page
from vitclinic.reports.study.page import render_study
from vitclinic.reports.study.result import StudyResult, read_result
from vitclinic.reports.study.tally import Claim, Entry, entries, write_index

log = logging.getLogger(__name__)

INDEX = "index.html"


def report_studies(folder: str | Path = "studies", *, title: str | None = None) -> Path:
    """Write the page of every result in a folder of `vitclinic study`, and an index of the catalogue beside them.

    Example:
        >>> report_studies("studies")  # doctest: +SKIP
        PosixPath('studies/index.html')
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"There is no folder '{folder}' of results: `vitclinic study` makes one.")
    results = stored_results(folder)
    for name, result in results.items():
        write_page(folder / f"{name}.html", render_study(result))
    return write_index(folder / INDEX, tally(results), title)


def stored_results(folder: Path) -> dict[str, StudyResult]:
    """The results of a folder by the names of their files; what is none is left out, with a warning."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            result = read_result(file)
            found[file.stem] = replace(result, blind=result.blind and result.claim not in not_blind())
        except RunError as error:
            log.warning("Left out: %s", error)
    return found


@cache
def not_blind() -> tuple[str, ...]:
    """Claims of the catalogue whose lines were drawn after first looks; results stored before do not say so."""
    return tuple(name for name in shipped_studies() if not open_study(name).blind)


def tally(results: dict[str, StudyResult]) -> list[Entry]:
    """Every claim of the catalogue with its results, or none yet."""
    studies = [open_study(name) for name in shipped_studies()]
    claims = [Claim(study.claim, study.title, study.paper, study.source) for study in studies]
    return entries(claims, results, changed)


_EXPERIMENT = ("base", "arms", "axes", "measures", "expectations")


def changed(result: StudyResult) -> str:
    """How a result of a claim of the catalogue came about otherwise than by its study, in words; "" if it did not."""
    shipped = open_study(result.claim)
    differences = [f"changed by {' '.join(result.words)}"] if result.words else []
    source = str(shipped.base["data"]["source"])
    if result.scale == "cpu" and result.data and result.data != (source,):
        differences.append(f"on {', '.join(result.data)} instead of {source}")
    try:
        stored = parse_study(result.design, result.claim)
    except RecipeError:
        return ", ".join([*differences, "by a study that this version cannot read"])
    parts = ("paper_scale", *_EXPERIMENT) if result.scale == "paper" else _EXPERIMENT
    if any(getattr(stored, part) != getattr(shipped, part) for part in parts):
        differences.append("by another study of that name")
    return ", ".join(differences)
