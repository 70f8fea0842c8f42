"""The verb `prescribe`: paired short trials of treatments on the user's own data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitclinic.data import Dataset, open_data
from vitclinic.errors import RecipeError, RunError
from vitclinic.prescribing.arms import PLAIN, Arm, Entry, Trials, candidates, pairs
from vitclinic.prescribing.costs import Costs
from vitclinic.prescribing.ledger import Decided, Ledger
from vitclinic.prescribing.plan import Stage, halved, make_plan, most_candidates, needed_budget, shrunk
from vitclinic.prescribing.prescription import Prescription
from vitclinic.prescribing.request import budget_seconds, check_data, folder_of, plain_recipe
from vitclinic.prescribing.selection import Trial, Tried, effect, verdict
from vitclinic.prescribing.watching import Watcher, written_time
from vitclinic.studies import Outcome, Pool, drop_weights, run_all
from vitclinic.studies import Watcher as RunsWatcher
from vitclinic.training import Recipe, Run
from vitclinic.training.budget import image_counts

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
        more = f", and about {written_time(all_)} for all {len(self.wanted)} treatments" if len(self.wanted) > 1 else ""
        return (
            f"A budget of {written_time(self.budget)} is too small: a step takes {self.costs.plain.step:.2g} s,"
            f" and a trial is to have {self.costs.least_steps()} steps at least. Comparing one treatment needs about"
            f" {written_time(one)}{more}; or give a smaller network, or fewer images (data.limit)."
        )
