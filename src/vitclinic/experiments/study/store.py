"""The folder of results: one file and one page for each study, and an index of the whole catalogue.

The plain call of a study, on its own data and with nothing changed, is named after its claim. Any other call has a
digest of what it changed behind the name, so that it never takes the place of the plain one. Of the same call, the
result with more seeds is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.io import fingerprint, read_json_file, sign, write_json
from vitclinic._core.lock import FOREVER, hold_lock
from vitclinic.data.named import NAMED_DATA
from vitclinic.experiments.study.catalogue import open_study, shipped_studies
from vitclinic.experiments.study.schema import ScaleName, Study, parse_study
from vitclinic.reports.frame import write_page
from vitclinic.reports.study_page import Claim, Entry, list_entries, render_study, write_index, write_study
from vitclinic.reports.study_result import StoredResult, read_result
from vitclinic.training import Recipe
from vitclinic.training.overrides import Overrides, to_plain

log = logging.getLogger(__name__)

INDEX = "index.html"
_SAME_CALL = ("schema", "study", "scale", "data", "words")
"""The fields that two results of the same call agree in; their seeds may differ."""
_EXPERIMENT = ("base", "arms", "axes", "ladders", "matched", "starts", "measures", "conditions", "expectations")
"""The fields of a study that decide what is trained, measured and judged."""


def name_result(study: Study, scale: ScaleName, words: Sequence[str], recipes: Collection[Recipe]) -> str:
    """Return the name of a result's file, without its ending.

    Args:
        study: The study as it was written.
        scale: At which it was conducted.
        words: The `key=value` words that changed more than where the data lies.
        recipes: Of its arms, as they were trained.
    """
    name = f"{study.claim}-paper" if scale == "paper" else study.claim
    if not words and name_data(recipes) == name_data(study.recipes(scale=scale).values()):
        return name
    changed = json.dumps([list(words), sorted({_resolve(recipe.data.source) for recipe in recipes})])
    return f"{name}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}"  # no claim has a + in its name


def to_words(overrides: Overrides | None) -> tuple[str, ...]:
    """Return changes to recipes as the `key=value` words that a result stores.

    Example:
        >>> to_words({"optimizer.lr": 3e-4, "treatments": ["sam"]})
        ('optimizer.lr=0.0003', 'treatments=["sam"]')
    """
    if not isinstance(overrides, Mapping):
        return tuple(overrides or ())
    return tuple(f"{key}={json.dumps(to_plain(value))}" for key, value in overrides.items())


def name_data(recipes: Iterable[Recipe]) -> tuple[str, ...]:
    """Return the names of the data that recipes train on, without where they lie."""
    return tuple(sorted({_name_source(recipe.data.source) for recipe in recipes}))


def _name_source(source: str) -> str:
    """Return `cifar10` for `CIFAR-10/`, `data/cifar10` and `torchvision:CIFAR10@data`, as studies call that set."""
    of_torchvision, _, _ = source.removeprefix("torchvision:").partition("@")
    name = of_torchvision if source.startswith("torchvision:") else Path(source).name
    known = name.lower().replace("-", "").replace("_", "")
    return known if known in NAMED_DATA else name


def _resolve(source: str) -> str:
    """Return the same text for a folder however it is written; two folders of one name differ."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def keep_result(file: Path, plain: Mapping[str, Any]) -> None:
    """Write a result and its page, unless the file holds the same with more seeds."""
    busy = f"Another command is writing '{file}': wait for it or stop it."
    with hold_lock(file.with_name(f".{file.name}.lock"), busy, patience=FOREVER):
        seeds = len(plain["seeds"])
        if _count_kept_seeds(file, plain) > seeds:
            log.warning("'%s' holds this study with more seeds and stays as it is.", file)
            return
        _set_other_study_aside(file, plain)
        write_json(file, sign(plain))
        write_study(file.with_suffix(".html"), plain)


def _set_other_study_aside(file: Path, plain: Mapping[str, Any]) -> None:
    """Rename the result of another study with the same claim, such as an earlier state of the file, by its digest."""
    try:
        stored = read_json_file(file, RunError)["study"]
        held = [stored.get(part) for part in _EXPERIMENT]
    except (RunError, LookupError, TypeError, AttributeError):
        return  # there is none, or nothing that could be read again
    if held == [json.loads(json.dumps(plain["study"])).get(part) for part in _EXPERIMENT]:
        return
    name = f"{file.stem}+{fingerprint(stored)[:8]}"
    log.warning("'%s' held the result of another study with this claim, which is '%s.json' now.", file, name)
    for one in (file, file.with_suffix(".html")):
        if one.exists():
            one.rename(one.with_name(f"{name}{one.suffix}"))


def _count_kept_seeds(file: Path, plain: Mapping[str, Any]) -> int:
    """Return how many seeds the same study, on the same data, has in the file; 0 if anything else is there."""
    asked = json.loads(json.dumps(plain))
    try:
        stored = read_json_file(file, RunError)
        same = all(stored[key] == asked[key] for key in _SAME_CALL) and _runs_agree(stored["runs"], asked["runs"])
        return len(stored["seeds"]) if same else 0
    except (RunError, LookupError, TypeError, AttributeError):
        return 0


def _runs_agree(stored: Mapping[str, Mapping[str, str]], asked: Mapping[str, Mapping[str, str]]) -> bool:
    """Compare the runs' folders, which are digests of recipe and data: other images of the same name have others."""
    return all(
        run in ("", stored[arm].get(seed) or run) for arm, by_seed in asked.items() for seed, run in by_seed.items()
    )


def report_studies(folder: str | Path = "studies", *, title: str | None = None) -> Path:
    """Write the page of every result in a folder of `vitclinic study`, and an index of the whole catalogue.

    Args:
        folder: The `out` of one or several calls of `study`.
        title: Of the index.

    Returns:
        The index.

    Raises:
        RunError: If there is no such folder.

    Example:
        >>> report_studies("studies")  # doctest: +SKIP
        PosixPath('studies/index.html')
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"There is no folder '{folder}' with results of studies: `vitclinic study` makes one.")
    results = read_results(folder)
    for name, result in results.items():
        write_page(folder / f"{name}.html", render_study(result))
    return write_index(folder / INDEX, tally(results), title)


def read_results(folder: Path) -> dict[str, StoredResult]:
    """Return the results in a folder by the names of their files; other files are left out with a warning."""
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
    """Return the claims whose limits were set after first looks; results stored before that do not say so."""
    return tuple(name for name in shipped_studies() if not open_study(name).blind)


def tally(results: Mapping[str, StoredResult]) -> list[Entry]:
    """Return every claim of the catalogue with its results, or with none yet."""
    studies = [open_study(name) for name in shipped_studies()]
    claims = [Claim(study.claim, study.title, study.paper, study.source) for study in studies]
    return list_entries(claims, results, describe_changes)


def describe_changes(result: StoredResult) -> str:
    """Say in words how a result differs from the catalogue's study of its claim; "" if it does not."""
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
    if any(_for_comparison(stored, part) != _for_comparison(shipped, part) for part in parts):
        differences.append("by another study of that name")
    return ", ".join(differences)


def _for_comparison(study: Study, part: str) -> Any:
    """Return a part of a study without what only its plan reads."""
    if part != "expectations":
        return getattr(study, part)
    return [expected.model_copy(update={"effect": None, "spread": None}) for expected in study.expectations]
