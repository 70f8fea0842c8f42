"""Where the result of a study is kept, so that none takes the place of a better one.

The plain call of a study, on its own data and with nothing changed, has the claim's name. Any other has a digest of
what it changed behind it. Of the same call, the result with more seeds is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.io import write_errors, write_json
from vitclinic._core.lock import FOREVER, hold_lock
from vitclinic._core.records import plain_data
from vitclinic.experiments.pool import Pool
from vitclinic.experiments.runner import Outcome, Watcher, run_all
from vitclinic.experiments.study.catalogue import NAMED_DATA, open_study, require_data
from vitclinic.experiments.study.measures import measured_of, training_seconds
from vitclinic.experiments.study.study import ScaleName, Study
from vitclinic.experiments.study.verdicts import Values, Verdict, judge
from vitclinic.reports.study.page import write_study
from vitclinic.training import Recipe

log = logging.getLogger(__name__)

_SAME = ("schema", "study", "scale", "data", "words")
"""What two results have in common that differ in their seeds only."""


def result_name(chosen: Study, scale: ScaleName, words: Sequence[str], recipes: Collection[Recipe]) -> str:
    """The name of a result's file, without its ending; `words` are those that changed more than the data."""
    name = f"{chosen.claim}-paper" if scale == "paper" else chosen.claim
    if not words and data_names(recipes) == data_names(chosen.recipes(scale=scale).values()):
        return name
    changed = json.dumps([list(words), sorted({_place(recipe.data.source) for recipe in recipes})])
    return f"{name}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}"  # no claim has a + in its name


def data_names(recipes: Iterable[Recipe]) -> tuple[str, ...]:
    """The names of the data that recipes are about, without where they lie."""
    return tuple(sorted({_data_name(recipe.data.source) for recipe in recipes}))


def _data_name(source: str) -> str:
    """`CIFAR-10/`, `data/cifar10` and `torchvision:CIFAR10@data` are all the set that studies call cifar10."""
    of_torchvision, _, _ = source.removeprefix("torchvision:").partition("@")
    name = of_torchvision if source.startswith("torchvision:") else Path(source).name
    known = name.lower().replace("-", "").replace("_", "")
    return known if known in NAMED_DATA else name


def _place(source: str) -> str:
    """The same for a folder however it is written; two folders of one name differ."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def keep(file: Path, plain: Mapping[str, Any]) -> None:
    """Write a result and its page, unless the file holds the same with more seeds, of which these would be a part."""
    busy = f"Another command is writing '{file}'; wait for it or stop it."
    with hold_lock(file.with_name(f".{file.name}.lock"), busy, patience=FOREVER):
        seeds = len(plain["seeds"])
        if _seeds_kept(file, plain) > seeds:
            log.warning("'%s' has more seeds and is kept: the result with %d is shown only here.", file, seeds)
            return
        write_json(file, plain)
        write_study(file.with_suffix(".html"), plain)


def _seeds_kept(file: Path, plain: Mapping[str, Any]) -> int:
    """How many seeds the same study, on the same data, has in the file; 0 if anything else is there."""
    asked = json.loads(json.dumps(plain))
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        same = all(stored[key] == asked[key] for key in _SAME) and _runs_agree(stored["runs"], asked["runs"])
        return len(stored["seeds"]) if same else 0
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def _runs_agree(stored: Mapping[str, Mapping[str, str]], asked: Mapping[str, Mapping[str, str]]) -> bool:
    """A run's folder is the digest of its recipe and its data: other images of the same name have others."""
    return all(
        run in ("", stored[arm].get(seed) or run) for arm, by_seed in asked.items() for seed, run in by_seed.items()
    )


SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """What a study found: the numbers of every run, and the verdict."""

    study: Study
    scale: ScaleName
    data: tuple[str, ...]
    """The names of the data it was conducted on, without where they lie."""
    words: tuple[str, ...]
    """What was changed of every recipe beside the data."""
    seeds: tuple[int, ...]
    values: Values
    missing: dict[str, dict[int, dict[str, str]]]
    """arm -> seed -> measure -> why it has no number."""
    runs: dict[str, dict[int, str]]
    """arm -> seed -> the run's folder in the pool."""
    statuses: dict[str, dict[int, str]]
    """arm -> seed -> finished, diverged, or why it failed."""
    verdict: Verdict
    seconds: float
    """What training took, by the runs' own record."""
    file: Path
    """Where this is stored."""
    named: str
    """What a command calls the study: its claim, or the name of its file."""

    @property
    def page(self) -> Path:
        """What a person reads of it."""
        return self.file.with_suffix(".html")

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """(arm, seed) -> why there is no run."""
        return {
            (arm, seed): self.statuses[arm][seed]
            for arm, by_seed in self.runs.items()
            for seed, folder in by_seed.items()
            if not folder
        }

    def plain(self) -> dict[str, Any]:
        """As it is stored: strict JSON."""
        return {
            "schema": SCHEMA,
            "claim": self.study.claim,
            "named": self.named,
            "study": plain_data(self.study.model_dump(mode="json", exclude_defaults=True), "study"),
            "scale": self.scale,
            "data": list(self.data),
            "words": list(self.words),
            "seeds": list(self.seeds),
            "verdict": str(self.verdict),
            "comparisons": [plain_data(asdict(one), one.says) for one in self.verdict.comparisons],
            "values": plain_data({arm: dict(by_seed) for arm, by_seed in self.values.items()}, "values"),
            "missing": plain_data(self.missing, "missing"),
            "runs": plain_data(self.runs, "runs"),
            "statuses": plain_data(self.statuses, "statuses"),
            "seconds": round(self.seconds, 1),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }


def study(
    what: str | Path | Study,
    *words: str,
    data: str | Path | None = None,
    scale: ScaleName = "cpu",
    seeds: int | None = None,
    processes: int = 1,
    ray: str | None = None,
    out: str | Path = "studies",
    watcher: Watcher | None = None,
) -> Result:
    """Conduct a study of the catalogue, of a file or made in Python; `words` change the recipe of every arm.

    Example:
        >>> result = study("C6", data="cifar10/", seeds=5)  # doctest: +SKIP
        >>> str(result.verdict)  # doctest: +SKIP
        'reproduced'

    Runs are trained once per digest, in `out/pool`, whatever study asks for them; the result is `out/CLAIM.json` (at
    the paper's scale `out/CLAIM-paper.json`; with other words or data, a digest of them follows a +), with a page about
    it beside it. The same call goes on where another was stopped; with fewer seeds than stored, it changes no file.
    """
    chosen = what if isinstance(what, Study) else open_study(what)
    numbers = tuple(range(seed_count(chosen, scale, seeds)))
    recipes = chosen.recipes(with_data(words, data), scale)
    require_data(chosen.claim, recipes.values())
    folder = Path(out)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    places = [(arm, seed) for seed in numbers for arm in recipes]
    outcomes = run_all(
        [_seeded(recipes[arm], seed) for arm, seed in places],
        Pool(folder / "pool"),
        processes=processes,
        ray=ray,
        after=partial(measured_of, measures=chosen.measures),
        watcher=watcher,
    )
    if all(outcome.status == "failed" for outcome in outcomes):
        raise RunError(f"Every run of {chosen.claim} failed: {outcomes[0].reason}")
    ended = list(zip(places, outcomes, strict=True))
    values = _laid_out((place, outcome.measured.numbers) for place, outcome in ended)
    changed = tuple(word for word in words if word.partition("=")[0] not in ("data", "data.source"))
    result = Result(
        study=chosen,
        scale=scale,
        data=data_names(recipes.values()),
        words=changed,
        seeds=numbers,
        values=values,
        missing=_laid_out((place, outcome.measured.missing) for place, outcome in ended if outcome.measured.missing),
        runs=_laid_out((place, outcome.path.name if outcome.path else "") for place, outcome in ended),
        statuses=_laid_out((place, _status(outcome)) for place, outcome in ended),
        verdict=judge(chosen.judged_at(scale), values, numbers),
        seconds=_seconds(outcomes),
        file=folder / f"{result_name(chosen, scale, changed, recipes.values())}.json",
        named=_name(what),
    )
    keep(result.file, result.plain())
    return result


def with_data(words: Sequence[str], data: str | Path | None) -> tuple[str, ...]:
    """`--data D` as the word that it is short for."""
    return tuple(words) if data is None else (*words, f"data.source={json.dumps(str(data))}")


def seed_count(chosen: Study, scale: ScaleName, asked: int | None) -> int:
    """How many seeds to use, of those asked for."""
    if asked is not None and asked < 1:
        raise RecipeError(f"A study needs at least one seed (got {asked}).")
    return chosen.seeds_at(scale) if asked is None else asked


def _name(what: str | Path | Study) -> str:
    return what.claim if isinstance(what, Study) else Path(what).name


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"seed": seed})


def _status(outcome: Outcome) -> str:
    return outcome.reason or "failed" if outcome.status == "failed" else outcome.status


def _laid_out(things: Iterable[tuple[tuple[str, int], Any]]) -> dict[str, dict[int, Any]]:
    """arm -> seed -> thing."""
    found: dict[str, dict[int, Any]] = {}
    for (arm, seed), thing in things:
        found.setdefault(arm, {})[seed] = thing
    return found


def _seconds(outcomes: Sequence[Outcome]) -> float:
    trained = {outcome.path: outcome.run for outcome in outcomes if outcome.path is not None}
    return math.fsum(training_seconds(run) for run in trained.values())
