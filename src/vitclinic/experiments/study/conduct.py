"""The verb `study`: train every arm with every seed, measure the runs, judge the claim, and store the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.io import write_errors
from vitclinic._core.records import plain_data
from vitclinic.experiments.runner import Measured, Outcome, Pool, run_all
from vitclinic.experiments.study.catalogue import open_study, require_data
from vitclinic.experiments.study.measures import measure_matched, measure_run, measure_target, training_seconds
from vitclinic.experiments.study.schema import ScaleName, Study
from vitclinic.experiments.study.store import keep_result, name_data, name_result, to_words
from vitclinic.experiments.study.verdicts import Values, Verdict, judge
from vitclinic.reports.study_result import SCHEMA
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.overrides import Overrides

Place = tuple[str, int]
"""Arm and seed of a run."""


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study: the numbers of every run, and the verdict on the claim.

    Example:
        >>> result = vitclinic.study("C6", data="cifar10/")  # doctest: +SKIP
        >>> str(result.verdict)  # doctest: +SKIP
        'reproduced'
        >>> result.values["SAM"][0]["missing_rate"]  # arm, seed, measure  # doctest: +SKIP
        0.41
        >>> result.page  # doctest: +SKIP
        PosixPath('studies/C6.html')
    """

    study: Study
    scale: ScaleName
    data: tuple[str, ...]
    """The names of the data it was conducted on, without where they lie."""
    words: tuple[str, ...]
    """The `key=value` words that changed every recipe, without those that say where the data lies."""
    seeds: tuple[int, ...]
    values: Values
    """arm -> seed -> measure -> number; NaN where there is none."""
    missing: dict[str, dict[int, dict[str, str]]]
    """arm -> seed -> measure -> why it has no number."""
    epochs: dict[str, dict[int, int | None]]
    """matched arm -> seed -> the epoch at which it was measured."""
    runs: dict[str, dict[int, str]]
    """arm -> seed -> the run's folder in the pool."""
    statuses: dict[str, dict[int, str]]
    """arm -> seed -> finished, diverged, measured (a target), or why it failed."""
    verdict: Verdict
    seconds: float
    """The time that training took, by the runs' own record."""
    file: Path
    """The JSON file that holds this."""
    named: str
    """The name of the study in a command: its claim, or that of its file."""

    @property
    def page(self) -> Path:
        """The HTML page about it."""
        return self.file.with_suffix(".html")

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """(arm, seed) -> why there is no run."""
        return {
            (arm, seed): self.statuses[arm][seed]
            for arm, by_seed in self.runs.items()
            for seed, folder in by_seed.items()
            if not folder and self.statuses[arm][seed] != "measured"
        }

    def plain(self) -> dict[str, Any]:
        """Return it as it is stored: strict JSON."""
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
            "conditions": [asdict(one) for one in self.verdict.conditions],
            "epochs": plain_data(self.epochs, "epochs"),
            "values": plain_data({arm: dict(by_seed) for arm, by_seed in self.values.items()}, "values"),
            "missing": plain_data(self.missing, "missing"),
            "runs": plain_data(self.runs, "runs"),
            "statuses": plain_data(self.statuses, "statuses"),
            "seconds": round(self.seconds, 1),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }


def study(
    what: str | Path | Study,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    scale: ScaleName = "cpu",
    seeds: int | None = None,
    processes: int = 1,
    ray: str | None = None,
    slurm: str | None = None,
    cores: int | None = None,
    gpus: int | None = None,
    out: str | Path = "studies",
    targets: Mapping[str, str | Sequence[str]] | None = None,
    callbacks: Sequence[Callback] = (),
) -> StudyResult:
    """Conduct a study: train every arm with every seed, measure, and judge the claim.

    A run is trained once, in `out/pool`, whatever study asks for it, and the same call goes on where another was
    stopped. The result is `out/CLAIM.json` with a page beside it; at the paper's scale `out/CLAIM-paper.json`; with
    overrides or other data, a + and a digest of them follow the name. A call with fewer seeds than are stored changes
    no file.

    Args:
        what: A claim of the catalogue (`vitclinic list studies`), a study file, or a `Study`.
        overrides: Changes to the recipe of every arm: `{"epochs": 20}`, or words such as `"epochs=20"`.
        data: Your copy of the study's data, or other data to conduct it on.
        scale: `cpu`, or `paper` for the paper's own setting.
        seeds: How many seeds; as many as the study says unless given.
        processes: How many runs to train at a time; they share the cores.
        ray: The address of a Ray cluster to train on; `auto` for the one this machine belongs to.
        slurm: Train in jobs of a SLURM cluster: their options, as in `partition=gpu,time=8h,gpus=1`, or `auto`.
        cores: Of each run on a cluster; 1 unless given.
        gpus: Of each run on a cluster: unless given, one on a Ray cluster that has any, and what `slurm` says.
        out: The folder for runs and results.
        targets: Networks to measure in place of training some arms: `{"ViT": "timm:vit_small_patch16_224"}`, whatever
            `examine` takes; or a list of them, one for each seed.
        callbacks: Their hooks `on_progress` and `on_run` are called as runs go on and end.

    Returns:
        The numbers of every run and the verdict. One run's failure does not stop the others: see `failures`.

    Raises:
        RecipeError: The study, an override or the number of seeds is wrong.
        DataError: The data is not there.
        RunError: Every run failed.

    Example:
        >>> result = vitclinic.study("C6", data="cifar10/", seeds=5)  # doctest: +SKIP
        >>> str(result.verdict)  # doctest: +SKIP
        'reproduced'
    """
    if ray is None and slurm is None and (cores, gpus) != (None, None):
        raise RecipeError("cores and gpus are those of a run on a cluster: name one with ray or slurm.")
    chosen = what if isinstance(what, Study) else open_study(what)
    if targets:
        chosen = chosen.with_targets(targets)
    numbers = tuple(range(chosen.seeds_at(scale, seeds)))
    recipes = chosen.recipes(overrides, scale, data)
    examined = [chosen.base_recipe(overrides, scale, data)] if chosen.targets else []
    require_data(chosen.claim, [*recipes.values(), *examined])
    folder = Path(out)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    changes = tuple(word for word in to_words(overrides) if word.partition("=")[0] not in ("data", "data.source"))
    changes += to_words({f"target {arm}": names for arm, names in (targets or {}).items()})
    file = folder / f"{name_result(chosen, scale, changes, recipes.values())}.json"
    where = {"processes": processes, "ray": ray, "slurm": slurm, "threads": cores, "gpus": gpus, "callbacks": callbacks}
    ended = _train_arms(chosen, recipes, numbers, Pool(folder / "pool"), **where)
    for base in examined:
        ended |= _measure_targets(chosen, numbers, base, folder / "exams")
    result = StudyResult(
        study=chosen,
        scale=scale,
        data=name_data([*recipes.values(), *examined]),
        words=changes,
        seeds=numbers,
        file=file,
        named=what.claim if isinstance(what, Study) else Path(what).name,
        **_judge_outcomes(chosen.at_scale(scale), numbers, ended),
    )
    keep_result(result.file, result.plain())
    return result


def _train_arms(
    chosen: Study, recipes: Mapping[str, Recipe], seeds: Sequence[int], pool: Pool, **where: Any
) -> dict[Place, Outcome]:
    """Train every arm with every seed and measure the runs; `where` are further arguments of `run_all`.

    Raises:
        RunError: Every run failed.
    """
    places = [(arm, seed) for seed in seeds for arm in recipes]
    runs = {(arm, seed): _set_seed(recipes[arm], seed) for arm, seed in places}
    found: dict[Place, Outcome] = {}
    for second in (False, True):
        ready = {}
        for arm, seed in (place for place in places if (place[0] in chosen.starts) == second):
            started = _start(runs[arm, seed], found[chosen.starts[arm], seed]) if second else runs[arm, seed]
            if isinstance(started, Recipe):
                ready[arm, seed] = started
            else:
                found[arm, seed] = started
        if ready:
            after = partial(measure_run, measures=chosen.measures)
            outcomes = run_all(list(ready.values()), pool, after=after, **where)
            found |= dict(zip(ready, outcomes, strict=True))
    if recipes and all(outcome.status == "failed" for outcome in found.values()):
        raise RunError(f"Every run of {chosen.claim} failed: {found[places[0]].reason}")
    return {place: found[place] for place in places}


def _start(recipe: Recipe, before: Outcome) -> Recipe | Outcome:
    """Return the recipe with the last weights of another run to begin with, or an outcome where there are none."""
    if before.status == "finished":
        return build_recipe(recipe, {"init": f"{before.run.path}@last"})
    return Outcome(recipe, "failed", reason=f"the run whose weights it begins with has {before.status}")


def _judge_outcomes(chosen: Study, seeds: Sequence[int], ended: Mapping[Place, Outcome]) -> dict[str, Any]:
    """Return the fields of a result that follow from the outcomes of all runs, by arm and seed."""
    matched, epochs = _match_arms(chosen, seeds, ended)
    ended = {**ended, **matched}
    values = _by_arm((place, outcome.measured.numbers) for place, outcome in ended.items())
    return {
        "values": values,
        "epochs": _by_arm(epochs.items()),
        "missing": _by_arm((place, one.measured.missing) for place, one in ended.items() if one.measured.missing),
        "runs": _by_arm((place, outcome.path.name if outcome.path else "") for place, outcome in ended.items()),
        "statuses": _by_arm((place, _describe_status(outcome)) for place, outcome in ended.items()),
        "verdict": judge(chosen, values, seeds),
        "seconds": _sum_training_seconds(list(ended.values())),
    }


def _match_arms(
    chosen: Study, seeds: Sequence[int], ended: Mapping[Place, Outcome]
) -> tuple[dict[Place, Outcome], dict[Place, int | None]]:
    """Return the outcomes of the matched arms, each its own run measured at another epoch, and these epochs."""
    found: dict[Place, Outcome] = {}
    epochs: dict[Place, int | None] = {}
    for name, match in chosen.matched.items():
        for seed in seeds:
            of, to = ended[match.of, seed], ended[match.to, seed]
            found[name, seed], epochs[name, seed] = replace(of, measured=Measured({}, {})), None
            if of.status == "finished":
                goal = to.measured.numbers.get(match.measure, math.nan)
                with of.run.lock():
                    measured, epoch = measure_matched(of.run, of.recipe.data, chosen.measures, match.measure, goal)
                found[name, seed], epochs[name, seed] = replace(of, measured=measured), epoch
    return found, epochs


def _measure_targets(chosen: Study, seeds: Sequence[int], base: Recipe, out: Path) -> dict[Place, Outcome]:
    """Return the outcomes of arms that are networks to be measured: each name once, whatever seeds have it."""
    found: dict[Place, Outcome] = {}
    known: dict[str, Outcome] = {}
    for arm, names in chosen.targets.items():
        for seed in seeds:
            name = names[0] if len(names) == 1 else names[seed] if seed < len(names) else None
            if name is not None and name not in known:
                measured = measure_target(name, base.data, chosen.measures, out)
                known[name] = Outcome(base, "measured", measured=measured)
            found[arm, seed] = known[name] if name is not None else Outcome(base, "failed", reason="there is no target")
    return found


def _set_seed(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"seed": seed})


def _describe_status(outcome: Outcome) -> str:
    return outcome.reason or "failed" if outcome.status == "failed" else outcome.status


def _by_arm(things: Iterable[tuple[Place, Any]]) -> dict[str, dict[int, Any]]:
    """Return arm -> seed -> thing."""
    found: dict[str, dict[int, Any]] = {}
    for (arm, seed), thing in things:
        found.setdefault(arm, {})[seed] = thing
    return found


def _sum_training_seconds(outcomes: Sequence[Outcome]) -> float:
    trained = {outcome.path: outcome.run for outcome in outcomes if outcome.path is not None}
    return math.fsum(training_seconds(run) for run in trained.values())
