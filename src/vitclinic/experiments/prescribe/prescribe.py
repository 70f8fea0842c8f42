"""What was asked for: the plain recipe, its data, the budget and where the prescription goes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic._core.hashing import fingerprint
from vitclinic._core.io import write_errors
from vitclinic._core.time import format_duration, seconds
from vitclinic.data import Dataset, open_data
from vitclinic.experiments.prescribe.arms import PLAIN, Arm, Entry, Trials, candidates, pairs
from vitclinic.experiments.prescribe.callback import Watcher
from vitclinic.experiments.prescribe.costs import Costs
from vitclinic.experiments.prescribe.ledger import FILE, Decided, Ledger
from vitclinic.experiments.prescribe.plan import Stage, halved, make_plan, most_candidates, needed_budget, shrunk
from vitclinic.experiments.prescribe.prescription import Prescription
from vitclinic.experiments.prescribe.selection import Trial, Tried, effect, verdict
from vitclinic.experiments.study import Outcome, Pool, drop_weights, run_all
from vitclinic.experiments.study import Watcher as RunsWatcher
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.budget import image_counts

LEAST_IMAGES = 50
"""Of val and of test: fewer cannot tell arms apart."""


def plain_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None, words: Sequence[str], data: str | None
) -> Recipe:
    """The recipe to compare with. Its seed is the prescription's to choose."""
    if isinstance(recipe, Recipe):
        recipe = recipe.plain()
    resolved = build_recipe(recipe, words)
    if data is not None:
        resolved = resolved.model_copy(update={"data": resolved.data.model_copy(update={"source": data})})
    if resolved.out is not None:
        raise RecipeError("out= is for one run; say where a prescription goes with --out (Python: out=).")
    if not resolved.test:
        raise RecipeError("test=false leaves the final comparison without its measure; remove it.")
    if "accuracy" not in {metric.name for metric in resolved.task.metrics}:
        raise RecipeError(f"prescribe compares accuracies, and the task {resolved.task.name} has none.")
    return resolved.model_copy(update={"seed": 0})


def budget_seconds(budget: str | float) -> float:
    """`--budget` in seconds."""
    try:
        time = seconds(budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error} (got '{budget}').") from None
    if time <= 0:
        raise RecipeError("--budget: the time must be longer than nothing.")
    return time


def check_data(dataset: Dataset) -> None:
    """A sentence for a set that has too few images to select or to compare on."""
    dataset.check_trainable()
    for split, use in (("val", "selects"), ("test", "compares in the end")):
        count = len(dataset.splits[split])
        if count < LEAST_IMAGES:
            raise DataError(
                f"'{dataset.name}' has {count} {split} images, and prescribe {use} on them: {LEAST_IMAGES} are needed"
                f" at least ({10 * LEAST_IMAGES} images in all, where a tenth of them is held out)."
            )


def folder_of(out: str | Path | None, recipe: Recipe, dataset: Dataset, identity: Mapping[str, Any]) -> Path:
    """Where it goes: the same place for the same question, so that the same command goes on."""
    if out is None:
        name = "-".join([Path(dataset.name).name, recipe.model.name, fingerprint(identity)[:8]])
        folder = Path("prescriptions") / re.sub(r"[^\w.,=-]+", "-", name)
    else:
        folder = Path(out).expanduser()
    if not (folder / FILE).is_file():
        Run(folder).refuse_foreign_files()
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


FRESH = 100
"""The final comparison's seeds begin so far above the selection's."""
APART = 1000
"""The seeds of two prescriptions, with `seed` 0 and 1, are so far apart."""


def prescribe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *words: str,
    data: str | None = None,
    budget: str | float = "1h",
    treatments: Sequence[Entry] | None = None,
    first: Sequence[str] = (),
    seed: int = 0,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Prescription:
    """Try treatments against a recipe on its data, within `budget`, and say whether one helps.

    Short trials with the same seeds and the same time select on val; the winner and the plain recipe are then compared
    on seeds that were not used before, on test. Interrupted, the same call goes on.

    Example:
        >>> found = prescribe(data="photos/", budget="1h")  # doctest: +SKIP
        >>> found.statement, found.recipe  # doctest: +SKIP
    """
    watcher = watcher or Watcher()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("prescribe runs in one process; start it without torchrun.")
    resolved = plain_recipe(recipe, words, data)
    time = budget_seconds(budget)
    arms = candidates(resolved, treatments, first)
    dataset = open_data(
        resolved.data, size=resolved.image_size, channels=resolved.model.in_chans, progress=watcher.on_reading
    )
    check_data(dataset)
    identity = {
        "recipe": resolved.digest(dataset.digest),
        "budget": time,
        "candidates": [arm.name for arm in arms],
        "seed": seed,
    }
    folder = folder_of(out, resolved, dataset, identity)
    with Run(folder).locked():
        return _Prescriber(folder, resolved, dataset, arms, time, seed, watcher, identity).prescription()


class _Prescriber:
    """One prescription: measures, plans, selects, compares. All it decides is in its ledger first."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        dataset: Dataset,
        wanted: Sequence[Arm],
        budget: float,
        seed: int,
        watcher: Watcher,
        identity: Mapping[str, Any],
    ) -> None:
        self.folder, self.recipe, self.dataset, self.wanted = folder, recipe, dataset, wanted
        self.budget, self.seed, self.watcher = budget, seed, watcher
        self.counts = image_counts(dataset)
        self.pool = Pool(folder / "runs")
        self.ledger = Ledger(folder, identity)
        self.costs = Costs(recipe, dataset, self.ledger)
        self.trials = Trials(recipe, self.costs.own_steps(), self.counts)

    def prescription(self) -> Prescription:
        arms = self._candidates()
        self.watcher.on_plan(self.ledger.plan, arms, self.ledger.left_out, self.ledger.used, self.budget)
        rungs = []
        singles = halved(len(arms))
        for number in range(len(singles)):
            last = number == len(singles) - 1
            tried = self._tried(number, [Arm(), *arms, *(self._pairs(arms) if last else [])])
            rungs.append(tried)
            keep = 1 if last else singles[number + 1]
            by_name = {arm.name: arm for arm in self.ledger.decided[number].arms}
            arms = [by_name[name] for name in tried.best(keep)]
            if not arms:
                raise RunError(f"No trial of a treatment could be run: {next(iter(tried.failed.values()))}")
            self.watcher.on_tried(tried, [arm.name for arm in arms])
        final = self._tried(len(singles), [Arm(), arms[0]])
        if final.failed:
            raise RunError(f"The final comparison failed: {next(iter(final.failed.values()))}")
        return self._concluded(rungs, final, arms[0])

    def _concluded(self, rungs: Sequence[Tried], final: Tried, winner: Arm) -> Prescription:
        found = effect(final, winner.name)
        failed = {arm: reason for tried in rungs for arm, reason in tried.failed.items()}
        # A pair that goes together in the other order only was tried.
        measured = [set(name.split(" + ")) for name in self.ledger.costs]
        unfit = {name: why for name, why in self.ledger.left_out.items() if set(name.split(" + ")) not in measured}
        result = Prescription(
            folder=self.folder,
            verdict=verdict(found),
            winner=winner,
            effect=found,
            plain=self.recipe,
            rungs=rungs,
            final=final,
            left_out={**unfit, **failed},
            step_costs={name: cost.step for name, cost in self.ledger.costs.items()},
            own_steps=self.trials.own_steps,
            budget=self.budget,
            used=self.ledger.used,
        )
        result.write()
        return result

    def _candidates(self) -> list[Arm]:
        """The treatments that apply and that the budget has time for; with the plan for them, decided once."""
        ledger = self.ledger
        if ledger.candidates is not None:
            return ledger.candidates
        plain, trial = self.costs.plain, self.trials.recipe_of(Arm(), 1, 0, test=True)
        longest = plain.seconds(self.trials.own_steps, trial, self.counts)
        least = plain.seconds(self.costs.least_steps(), trial, self.counts)
        most = most_candidates(len(self.wanted), self.budget - ledger.used, plain.start, longest, least)
        if most == 0:
            raise RecipeError(self._too_small(plain.start, longest, least))
        arms: list[Arm] = []
        for number, arm in enumerate(self.wanted):
            self.watcher.on_measuring(arm.name, number, len(self.wanted))
            if len(arms) == most:
                ledger.left_out[arm.name] = "the budget has no time for it"
            elif self.costs.of(arm):
                arms.append(arm)
        if not arms:
            reasons = " ".join(f"{name}: {reason}" for name, reason in ledger.left_out.items())
            raise RecipeError(f"No treatment applies to this network and data. {reasons}")
        overhead = min(cost.start for cost in ledger.costs.values())
        ledger.save()
        ledger.plan = make_plan(len(arms), self.budget - ledger.used, overhead, longest)
        ledger.candidates = arms
        ledger.save()
        return arms

    def _pairs(self, best: Sequence[Arm]) -> list[Arm]:
        """Every two of the best that go together, in the order in which they do."""
        found = []
        for orders in pairs(best):
            fitting = next((arm for arm in orders if self.costs.of(arm)), None)
            if fitting is not None:
                found.append(fitting)
        return found

    def _tried(self, number: int, arms: Sequence[Arm]) -> Tried:
        """The trials of a stage, of which those that have ended are not repeated."""
        decided = self._decided(number, arms)
        final = number == len(self.ledger.plan) - 1
        recipes = {
            (arm.name, seed): self.trials.recipe_of(arm, decided.steps[arm.name], seed, test=final)
            for seed in decided.seeds
            for arm in decided.arms
        }
        outcomes = run_all(list(recipes.values()), self.pool, watcher=self._runs_watcher(number, final))
        trials, failed = [], {}
        for (arm_name, seed), outcome in zip(recipes, outcomes, strict=True):
            if outcome.status == "failed":
                failed[arm_name] = str(outcome.reason)
            else:
                trials.append(self._trial(arm_name, seed, outcome, "test" if final else "val"))
        if PLAIN in failed:
            raise RunError(f"The plain recipe failed in {decided.stage.name}: {failed[PLAIN]}")
        self.ledger.end_stage(number)
        return Tried(decided.stage.name, decided.stage.seconds, decided.seeds, trials, failed)

    def _decided(self, number: int, arms: Sequence[Arm]) -> Decided:
        """How the stage is run: planned, and shorter where the time has run faster than planned."""
        ledger = self.ledger
        if number == len(ledger.decided):
            ledger.save()
            stage = shrunk(ledger.plan[number:], self.budget - ledger.used, ledger.slowness)[0]
            final = number == len(ledger.plan) - 1
            begin = self.seed * APART + (FRESH if final else 0)
            steps = {arm.name: self._steps(arm, stage, final) for arm in arms}
            seeds = range(begin, begin + stage.seeds)
            ledger.decided.append(Decided(stage, tuple(arms), steps, seeds, began=ledger.used))
            ledger.save()
        self.watcher.on_stage(ledger.decided[number])
        return ledger.decided[number]

    def _steps(self, arm: Arm, stage: Stage, final: bool) -> int:
        """As many steps of this arm as fit into the stage's time for a trial."""
        recipe = self.trials.recipe_of(arm, 1, 0, test=final)
        return max(1, self.ledger.costs[arm.name].steps_within(stage.seconds, recipe, self.counts))

    def _runs_watcher(self, number: int, final: bool) -> RunsWatcher:
        prescriber, ledger = self, self.ledger
        before = sum(stage.planned for stage in ledger.plan[:number])
        share, total = ledger.plan[number].planned, sum(stage.planned for stage in ledger.plan)

        class Progress(RunsWatcher):
            def on_progress(self, done: float, runs: int) -> None:
                prescriber.watcher.on_progress(before + share * done / runs, total)

            def on_outcome(self, outcome: Outcome) -> None:
                if outcome.status != "failed" and not final:
                    drop_weights(outcome.run)
                ledger.save()

        return Progress()

    def _trial(self, arm: str, seed: int, outcome: Outcome, split: str) -> Trial:
        run, steps = outcome.run, outcome.recipe.steps
        assert steps is not None
        assert outcome.status != "failed"
        if outcome.status == "diverged":
            return Trial(arm, seed, steps, "diverged", 1 / len(self.dataset.classes), None, run.path.name)
        score = run.results[split]
        return Trial(arm, seed, steps, "finished", score["accuracy"], score["nll"], run.path.name)

    def _too_small(self, overhead: float, longest: float, least: float) -> str:
        """What would be needed instead; a tenth more than the sum, for measuring."""
        one, all_ = (1.1 * needed_budget(n, overhead, longest, least) for n in (1, len(self.wanted)))
        more = (
            f", and about {format_duration(all_)} for all {len(self.wanted)} treatments" if len(self.wanted) > 1 else ""
        )
        return (
            f"A budget of {format_duration(self.budget)} is too small: a step takes {self.costs.plain.step:.2g} s,"
            f" and a trial is to have {self.costs.least_steps()} steps at least. Comparing one treatment needs about"
            f" {format_duration(one)}{more}; or give a smaller network, or fewer images (data.limit)."
        )
