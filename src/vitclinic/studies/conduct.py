"""The verb `study`: train what is missing, measure what is missing, judge, and keep the result as one file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from vitclinic.errors import RunError
from vitclinic.files import write_json
from vitclinic.measurement import plain_data
from vitclinic.studies.catalogue import open_study
from vitclinic.studies.measuring import numbers_of, training_seconds
from vitclinic.studies.runner import Outcome, Watcher, run_all
from vitclinic.studies.store import Pool
from vitclinic.studies.study import Study
from vitclinic.studies.verdicts import Values, Verdict, judge
from vitclinic.training import Recipe

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """What a study found: the numbers of every run, and the verdict."""

    study: Study
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Values
    runs: dict[str, dict[int, str]]
    """arm -> seed -> the run's folder in the pool."""
    statuses: dict[str, dict[int, str]]
    """arm -> seed -> finished, diverged, or why it failed."""
    verdict: Verdict
    seconds: float
    """What training took, by the runs' own record."""

    def plain(self) -> dict[str, Any]:
        """As it is stored: strict JSON."""
        return {
            "schema": SCHEMA,
            "claim": self.study.claim,
            "study": plain_data(self.study.model_dump(mode="json", exclude_defaults=True), "study"),
            "words": list(self.words),
            "seeds": list(self.seeds),
            "verdict": str(self.verdict),
            "comparisons": [plain_data(asdict(one), one.says) for one in self.verdict.comparisons],
            "values": plain_data({arm: dict(by_seed) for arm, by_seed in self.values.items()}, "values"),
            "runs": plain_data(self.runs, "runs"),
            "statuses": plain_data(self.statuses, "statuses"),
            "seconds": round(self.seconds, 1),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }


def study(
    what: str | Path | Study,
    *words: str,
    out: str | Path = "studies",
    seeds: int | None = None,
    processes: int = 1,
    ray: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Conduct a study of the catalogue, of a file or made in Python; `words` change the recipe of every arm.

    Example:
        >>> result = study("C6", "data.source=cifar10/", seeds=5)  # doctest: +SKIP
        >>> str(result.verdict)  # doctest: +SKIP
        'reproduced'

    Runs are trained once per digest, in `out/pool`, whatever study asks for them; the result is `out/CLAIM.json`. The
    same call goes on where another was stopped.
    """
    chosen = what if isinstance(what, Study) else open_study(what)
    numbers = tuple(range(seeds if seeds is not None else chosen.seeds))
    recipes = chosen.recipes(words)
    wanted = [(arm, seed, _seeded(recipe, seed)) for seed in numbers for arm, recipe in recipes.items()]
    folder = Path(out)
    outcomes = run_all(
        [recipe for _, _, recipe in wanted],
        Pool(folder / "pool"),
        processes=processes,
        ray=ray,
        after=partial(numbers_of, measures=chosen.measures),
        watcher=watcher,
    )
    result = _result(chosen, words, numbers, [(arm, seed) for arm, seed, _ in wanted], outcomes)
    write_json(folder / f"{chosen.claim}.json", result.plain())
    return result


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"seed": seed})


def _result(
    chosen: Study,
    words: Sequence[str],
    seeds: tuple[int, ...],
    places: Sequence[tuple[str, int]],
    outcomes: Sequence[Outcome],
) -> Result:
    values: dict[str, dict[int, dict[str, float]]] = {}
    runs: dict[str, dict[int, str]] = {}
    statuses: dict[str, dict[int, str]] = {}
    for (arm, seed), outcome in zip(places, outcomes, strict=True):
        values.setdefault(arm, {})[seed] = outcome.numbers
        runs.setdefault(arm, {})[seed] = outcome.path.name if outcome.path else ""
        statuses.setdefault(arm, {})[seed] = (
            outcome.reason or outcome.status if outcome.path is None else outcome.status
        )
    if all(outcome.status == "failed" for outcome in outcomes):
        raise RunError(f"Every run of {chosen.claim} failed: {outcomes[0].reason}")
    trained = {outcome.path: outcome.run for outcome in outcomes if outcome.path is not None}
    seconds = math.fsum(training_seconds(run) for run in trained.values())
    return Result(chosen, tuple(words), seeds, values, runs, statuses, judge(chosen, values, seeds), seconds)
