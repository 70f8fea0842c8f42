"""The verb `prescribe`: measure costs, plan, select by short trials, and compare the winner with the plain recipe.

Every decision is in the ledger before it is acted on, so that the same call goes on after an interruption.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic._core.io import fingerprint, write_errors
from vitclinic._core.time import format_duration, parse_budget
from vitclinic.data import Dataset, open_data
from vitclinic.experiments.prescribe.ledger import FILE, Costs, DecidedStage, Ledger
from vitclinic.experiments.prescribe.plan import (
    PLAIN,
    Arm,
    Entry,
    Stage,
    Trials,
    count_affordable,
    find_needed_budget,
    halve,
    list_candidates,
    make_plan,
    pair_up,
    shrink,
)
from vitclinic.experiments.prescribe.prescription import (
    Prescription,
    Trial,
    TriedStage,
    judge_effect,
    measure_effect,
)
from vitclinic.experiments.runner import Outcome, Pool, drop_weights, run_all
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.budget import image_counts
from vitclinic.training.overrides import Overrides

LEAST_IMAGES = 50
"""The fewest val and test images: fewer cannot tell arms apart."""


def build_plain_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None, overrides: Overrides | None, data: str | Path | None
) -> Recipe:
    """Return the recipe to compare with, without a seed of its own."""
    resolved = build_recipe(recipe, overrides)
    if data is not None:
        resolved = resolved.model_copy(update={"data": resolved.data.model_copy(update={"source": str(data)})})
    if resolved.out is not None:
        raise RecipeError(
            "Remove `out` from the recipe: it is for a single run, and prescribe has an `out` of its own."
        )
    if not resolved.test:
        raise RecipeError("The final comparison needs the test images: remove test=false.")
    if "accuracy" not in {metric.name for metric in resolved.task.metrics}:
        raise RecipeError(f"prescribe compares accuracies, and the task {resolved.task.name} has none.")
    return resolved.model_copy(update={"seed": 0})


def check_data(dataset: Dataset) -> None:
    """Raise a DataError if there are too few images to select or to compare on."""
    dataset.check_trainable()
    for split, use in (("val", "selects"), ("test", "makes its final comparison")):
        count = len(dataset.splits[split])
        if count < LEAST_IMAGES:
            raise DataError(
                f"'{dataset.name}' has {count} {split} images, and prescribe {use} on them: it needs at least"
                f" {LEAST_IMAGES} ({10 * LEAST_IMAGES} images in total, where a tenth of them is held out)."
            )


def choose_folder(out: str | Path | None, recipe: Recipe, dataset: Dataset, identity: Mapping[str, Any]) -> Path:
    """Return where it goes: the same folder for the same question, so that the same command goes on."""
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
"""The offset of the final comparison's seeds from the selection's."""
APART = 1000
"""The distance between the seeds of two prescriptions with `seed` 0 and 1."""


def prescribe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    budget: str | float = "1h",
    treatments: Sequence[Entry] | None = None,
    first: Sequence[str] = (),
    seed: int = 0,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Prescription:
    """Try treatments on your data in short paired trials, and find out whether one helps.

    Trials with the same seeds and the same training time select on val, by successive halving; the winner and the plain
    recipe are then compared on test, with seeds that were not used before. After an interruption, the same call goes
    on.

    Args:
        recipe: The plain recipe, as `train` takes it.
        overrides: Changes to it: `{"optimizer.lr": 3e-4}`, or words such as `"optimizer.lr=3e-4"`.
        data: The data to try on, instead of the recipe's.
        budget: The time for all of it, such as `"30m"` or `"2h"`, or seconds.
        treatments: What to try, as names or {name: {option: value}}; all that apply unless given.
        first: Names of treatments to try first if the budget is not enough for all.
        seed: Another one has all trials repeated with other seeds.
        out: The folder for trials and evidence; `prescriptions/NAME` unless given.
        callbacks: Their hooks `on_progress`, `on_trial_plan`, `on_stage`, `on_tried` and `on_run` are called.

    Returns:
        The verdict, the recipe to train with, and all trials.

    Raises:
        RecipeError: The recipe, a treatment or the budget is wrong, or the budget too small.
        DataError: The data cannot be read, or has too few images.
        RunError: The folder is in use for something else, or a trial that cannot be left out failed.

    Example:
        >>> found = vitclinic.prescribe(data="photos/", budget="1h")  # doctest: +SKIP
        >>> print(found.statement)  # doctest: +SKIP
        conv_stem helps: +4.1% test accuracy (95% interval +2.9% to +5.3%, 5 fresh seeds), at the same training time.
        >>> vitclinic.train(found.recipe)  # doctest: +SKIP
    """
    callback = CallbackList(callbacks)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("prescribe runs in one process: start it without torchrun.")
    resolved = build_plain_recipe(recipe, overrides, data)
    time = parse_budget(budget)
    arms = list_candidates(resolved, treatments, first)
    dataset = open_data(
        resolved.data, size=resolved.image_size, channels=resolved.model.in_chans, progress=callback.on_progress
    )
    check_data(dataset)
    identity = {
        "recipe": resolved.digest(dataset.digest),
        "budget": time,
        "candidates": [arm.name for arm in arms],
        "seed": seed,
    }
    folder = choose_folder(out, resolved, dataset, identity)
    with Run(folder).lock():
        return _Prescriber(folder, resolved, dataset, arms, time, seed, callback, identity).prescribe()


class _Prescriber:
    """One prescription: measures costs, plans, selects and compares."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        dataset: Dataset,
        wanted: Sequence[Arm],
        budget: float,
        seed: int,
        callback: Callback,
        identity: Mapping[str, Any],
    ) -> None:
        self.folder, self.recipe, self.dataset, self.wanted = folder, recipe, dataset, wanted
        self.budget, self.seed, self.callback = budget, seed, callback
        self.counts = image_counts(dataset)
        self.pool = Pool(folder / "runs")
        self.ledger = Ledger(folder, identity)
        self.costs = Costs(recipe, dataset, self.ledger)
        self.trials = Trials(recipe, self.costs.count_own_steps(), self.counts)

    def prescribe(self) -> Prescription:
        """Return the prescription, of which stages that have ended are not repeated."""
        arms = self._choose_candidates()
        self.callback.on_trial_plan(self.ledger.plan, arms, self.ledger.left_out, self.ledger.used, self.budget)
        rungs = []
        singles = halve(len(arms))
        for number in range(len(singles)):
            last = number == len(singles) - 1
            tried = self._run_stage(number, [Arm(), *arms, *(self._pair_up(arms) if last else [])])
            rungs.append(tried)
            keep = 1 if last else singles[number + 1]
            by_name = {arm.name: arm for arm in self.ledger.decided[number].arms}
            arms = [by_name[name] for name in tried.best(keep)]
            if not arms:
                raise RunError(f"Every trial of a treatment failed: {next(iter(tried.failed.values()))}")
            self.callback.on_tried(tried, [arm.name for arm in arms])
        final = self._run_stage(len(singles), [Arm(), arms[0]])
        if final.failed:
            raise RunError(f"The final comparison failed: {next(iter(final.failed.values()))}")
        return self._conclude(rungs, final, arms[0])

    def _conclude(self, rungs: Sequence[TriedStage], final: TriedStage, winner: Arm) -> Prescription:
        found = measure_effect(final, winner.name)
        failed = {arm: reason for tried in rungs for arm, reason in tried.failed.items()}
        # A pair that goes together in the other order only was tried.
        measured = [set(name.split(" + ")) for name in self.ledger.costs]
        unfit = {name: why for name, why in self.ledger.left_out.items() if set(name.split(" + ")) not in measured}
        result = Prescription(
            folder=self.folder,
            verdict=judge_effect(found),
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

    def _choose_candidates(self) -> list[Arm]:
        """Return the treatments that apply and that the budget has time for; they and the plan are decided once."""
        ledger = self.ledger
        if ledger.candidates is not None:
            return ledger.candidates
        plain, trial = self.costs.plain, self.trials.make_recipe(Arm(), 1, 0, test=True)
        longest = plain.seconds(self.trials.own_steps, trial, self.counts)
        least = plain.seconds(self.costs.count_least_steps(), trial, self.counts)
        most = count_affordable(len(self.wanted), self.budget - ledger.used, plain.start, longest, least)
        if most == 0:
            raise RecipeError(self._explain_budget(plain.start, longest, least))
        arms: list[Arm] = []
        for number, arm in enumerate(self.wanted, 1):
            if len(arms) == most:
                ledger.left_out[arm.name] = "the budget has no time for it"
            elif self.costs.measure(arm):
                arms.append(arm)
            self.callback.on_progress("treatments timed", number, len(self.wanted))
        if not arms:
            reasons = " ".join(f"{name}: {reason}" for name, reason in ledger.left_out.items())
            raise RecipeError(f"No treatment applies to this network and data. {reasons}")
        overhead = min(cost.start for cost in ledger.costs.values())
        ledger.save()
        ledger.plan = make_plan(len(arms), self.budget - ledger.used, overhead, longest)
        ledger.candidates = arms
        ledger.save()
        return arms

    def _pair_up(self, best: Sequence[Arm]) -> list[Arm]:
        """Return every two of the best that go together, in the order in which they do."""
        found = []
        for orders in pair_up(best):
            fitting = next((arm for arm in orders if self.costs.measure(arm)), None)
            if fitting is not None:
                found.append(fitting)
        return found

    def _run_stage(self, number: int, arms: Sequence[Arm]) -> TriedStage:
        """Run the trials of a stage, and return them; those that have ended are not repeated."""
        decided = self._decide_stage(number, arms)
        final = number == len(self.ledger.plan) - 1
        recipes = {
            (arm.name, seed): self.trials.make_recipe(arm, decided.steps[arm.name], seed, test=final)
            for seed in decided.seeds
            for arm in decided.arms
        }
        outcomes = run_all(list(recipes.values()), self.pool, callbacks=[self._follow(number, final)])
        trials, failed = [], {}
        for (arm_name, seed), outcome in zip(recipes, outcomes, strict=True):
            if outcome.status == "failed":
                failed[arm_name] = str(outcome.reason)
            else:
                trials.append(self._read_trial(arm_name, seed, outcome, "test" if final else "val"))
        if PLAIN in failed:
            raise RunError(f"The plain recipe failed in {decided.stage.name}: {failed[PLAIN]}")
        self.ledger.end_stage(number)
        return TriedStage(decided.stage.name, decided.stage.seconds, decided.seeds, trials, failed)

    def _decide_stage(self, number: int, arms: Sequence[Arm]) -> DecidedStage:
        """Return how a stage is run: as planned, or shortened if the stages before took longer than planned."""
        ledger = self.ledger
        if number == len(ledger.decided):
            ledger.save()
            stage = shrink(ledger.plan[number:], self.budget - ledger.used, ledger.slowness)[0]
            final = number == len(ledger.plan) - 1
            begin = self.seed * APART + (FRESH if final else 0)
            steps = {arm.name: self._count_steps(arm, stage, final) for arm in arms}
            seeds = range(begin, begin + stage.seeds)
            ledger.decided.append(DecidedStage(stage, tuple(arms), steps, seeds, began=ledger.used))
            ledger.save()
        self.callback.on_stage(ledger.decided[number])
        return ledger.decided[number]

    def _count_steps(self, arm: Arm, stage: Stage, final: bool) -> int:
        """Return how many steps of an arm fit into the stage's time for a trial."""
        recipe = self.trials.make_recipe(arm, 1, 0, test=final)
        return max(1, self.ledger.costs[arm.name].steps_within(stage.seconds, recipe, self.counts))

    def _follow(self, number: int, final: bool) -> Callback:
        """Return a callback that keeps the ledger as trials end, and speaks of all stages' progress as one."""
        prescriber, ledger = self, self.ledger
        before = sum(stage.planned for stage in ledger.plan[:number])
        share, total = ledger.plan[number].planned, sum(stage.planned for stage in ledger.plan)

        class Progress(Callback):
            def on_progress(self, what: str, done: float, runs: float) -> None:
                prescriber.callback.on_progress("trials", before + share * done / runs, total)

            def on_run(self, outcome: Outcome) -> None:
                prescriber.callback.on_run(outcome)
                if outcome.status != "failed" and not final:
                    drop_weights(outcome.run)
                ledger.save()

        return Progress()

    def _read_trial(self, arm: str, seed: int, outcome: Outcome, split: str) -> Trial:
        run, steps = outcome.run, outcome.recipe.steps
        assert steps is not None
        assert outcome.status != "failed"
        if outcome.status == "diverged":
            return Trial(arm, seed, steps, "diverged", 1 / len(self.dataset.classes), None, run.path.name)
        score = run.results[split]
        return Trial(arm, seed, steps, "finished", score["accuracy"], score["nll"], run.path.name)

    def _explain_budget(self, overhead: float, longest: float, least: float) -> str:
        """Say which budget would do: a tenth more than the plan needs, for measuring costs."""
        one, all_ = (1.1 * find_needed_budget(n, overhead, longest, least) for n in (1, len(self.wanted)))
        more = (
            f", and about {format_duration(all_)} for all {len(self.wanted)} treatments" if len(self.wanted) > 1 else ""
        )
        return (
            f"A budget of {format_duration(self.budget)} is too small: a step takes {self.costs.plain.step:.2g} s,"
            f" and a trial needs at least {self.costs.count_least_steps()} steps. Comparing one treatment needs about"
            f" {format_duration(one)}{more}; or use a smaller network, or fewer images (data.limit)."
        )
