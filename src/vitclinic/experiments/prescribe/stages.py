"""The trials of one stage after the other: how long each is, decided in the ledger before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RunError
from vitclinic._core.time import format_duration
from vitclinic.experiments.prescribe.arms import PLAIN, Arm, Trials
from vitclinic.experiments.prescribe.ledger import Costs, DecidedStage
from vitclinic.experiments.prescribe.plan import Stage, add_pairs, shrink
from vitclinic.experiments.prescribe.prescription import Trial, TriedStage
from vitclinic.experiments.runner import Outcome, Pool, drop_weights, run_all

FRESH = 100
"""The offset of the final comparison's seeds from the selection's."""
APART = 1000
"""The distance between the seeds of two prescriptions with `seed` 0 and 1."""
FEWEST_STEPS = 5
"""An arm that has fewer steps in a trial is left out."""


class Stages:
    """The stages of a prescription, each run once however often it is asked for."""

    def __init__(self, pool: Pool, trials: Trials, costs: Costs, budget: float, seed: int, callback: Callback) -> None:
        self.pool, self.trials, self.costs, self.ledger = pool, trials, costs, costs.ledger
        self.budget, self.seed, self.callback = budget, seed, callback
        self.tried: list[TriedStage] = []

    def fits(self, arm: Arm, stage: Stage) -> bool:
        """Return False, with the reason in the ledger, if an arm cannot be trained, or not within a trial's time."""
        cost = self.costs.measure(arm)
        if cost is None:
            return False
        steps = self._count_steps(arm, stage)
        if steps >= min(FEWEST_STEPS, self.trials.own_steps):
            return True
        self.ledger.left_out[arm.name] = (
            f"a step takes {cost.step:.2g} s: a trial of {format_duration(stage.seconds)} has time for {steps}"
        )
        return False

    def run(self, number: int, arms: Sequence[Arm]) -> TriedStage:
        """Run the trials of a stage of the plan, and return them; those that have ended are not repeated."""
        decided = self._decide(number, arms)
        final = decided.stage.final
        recipes = {
            (arm.name, seed): self.trials.make_recipe(arm, decided.steps[arm.name], seed, test=final)
            for seed in decided.seeds
            for arm in decided.arms
        }
        outcomes = run_all(list(recipes.values()), self.pool, callbacks=[self._follow(number)])
        trials, failed = [], {}
        for (arm_name, seed), outcome in zip(recipes, outcomes, strict=True):
            if outcome.status == "failed":
                failed[arm_name] = str(outcome.reason)
            else:
                trials.append(self._read_trial(arm_name, seed, outcome, "test" if final else "val"))
        if PLAIN in failed:
            raise RunError(f"The plain recipe failed in {decided.stage.name}: {failed[PLAIN]}")
        self.ledger.end_stage(len(self.tried))
        self.tried.append(TriedStage(decided.stage, decided.seeds, trials, failed))
        return self.tried[-1]

    def rank_last(self) -> list[Arm]:
        """Return the arms of the last stage, best first, without the plain recipe and those that failed.

        Raises:
            RunError: All have failed.
        """
        tried, decided = self.tried[-1], self.ledger.decided[len(self.tried) - 1]
        by_name = {arm.name: arm for arm in decided.arms}
        ranked = [by_name[name] for name in tried.best()]
        if not ranked:
            raise RunError(f"Every trial of a remedy failed: {next(iter(tried.failed.values()))}")
        return ranked

    def _decide(self, number: int, arms: Sequence[Arm]) -> DecidedStage:
        """Return how a stage is run: as planned, or shortened if the stages before took longer than planned.

        The final comparison gets more pairs if growing ended early.
        """
        ledger, place = self.ledger, len(self.tried)
        if place == len(ledger.decided):
            ledger.save()
            left = self.budget - ledger.used
            coming = [replace(ledger.plan[number], arms=len(arms)), *ledger.plan[number + 1 :]]
            stage = shrink(coming, left, ledger.slowness)[0]
            if stage == coming[0] and stage.final:
                stage = add_pairs(stage, left, ledger.slowness)
            begin = self.seed * APART + (FRESH if stage.final else 0)
            steps = {arm.name: max(1, self._count_steps(arm, stage)) for arm in arms}
            seeds = range(begin, begin + stage.seeds)
            ledger.decided.append(DecidedStage(stage, tuple(arms), steps, seeds, began=ledger.used))
            ledger.save()
        self.callback.on_stage(ledger.decided[place])
        return ledger.decided[place]

    def _count_steps(self, arm: Arm, stage: Stage) -> int:
        """Return how many steps of an arm fit into the stage's time for a trial."""
        recipe = self.trials.make_recipe(arm, 1, 0, test=stage.final)
        return self.ledger.costs[arm.name].steps_within(stage.seconds, recipe, self.trials.images)

    def _follow(self, number: int) -> Callback:
        """Return a callback that keeps the ledger as trials end, and speaks of all stages' progress as one."""
        prescriber, ledger = self, self.ledger
        before = sum(stage.planned for stage in ledger.plan[:number])
        share, total = ledger.plan[number].planned, sum(stage.planned for stage in ledger.plan)

        class Progress(Callback):
            def on_progress(self, what: str, done: float, runs: float) -> None:
                prescriber.callback.on_progress("trials", before + share * done / runs, total)

            def on_run(self, outcome: Outcome) -> None:
                prescriber.callback.on_run(outcome)
                if outcome.status != "failed" and not ledger.plan[number].final:
                    drop_weights(outcome.run)
                ledger.save()

        return Progress()

    def _read_trial(self, arm: str, seed: int, outcome: Outcome, split: str) -> Trial:
        run, steps = outcome.run, outcome.recipe.steps
        assert steps is not None
        assert outcome.status != "failed"
        if outcome.status == "diverged":
            return Trial(arm, seed, steps, "diverged", 1 / len(self.costs.dataset.classes), None, run.path.name)
        score = run.results[split]
        return Trial(arm, seed, steps, "finished", score["accuracy"], score["nll"], run.path.name)
