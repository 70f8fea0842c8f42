"""The training loop: steps, rows of metrics, validations, checkpoints, signals.

After every step come, in this order: row, divergence check, validation, checkpoint, interruption. Rows are written
before the checkpoint that covers them, so truncating the metrics to a checkpoint's step gives exactly what an
uninterrupted run would have written by then.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RunError
from vitclinic._core.time import seconds
from vitclinic.training.budget import image_counts
from vitclinic.training.replanning import Timekeeper
from vitclinic.training.rows import MetricsFile, Row, cut_back
from vitclinic.training.run import Run
from vitclinic.training.schedule import Duration, in_steps, is_share
from vitclinic.training.signals import Interrupt
from vitclinic.training.trainer import Trainer

log = logging.getLogger(__name__)


class Session:
    """The training loop around a `Trainer`, which writes metrics, checkpoints and status to the run directory."""

    def __init__(self, run: Run, trainer: Trainer, callback: Callback, interrupt: Interrupt) -> None:
        self.run, self.trainer, self.interrupt = run, trainer, interrupt
        self.distributed = trainer.distributed
        self.callback = callback if self.distributed.is_leader else Callback()
        self.best: dict[str, Any] | None = None
        self.spent = 0.0
        self.evaluated = 0.0
        """Images a second in the last validation."""
        self.failure: str | None = None
        self.made_with = run.signatures
        self._resume()
        budget = trainer.recipe.max_time
        self.timekeeper = None if budget is None else Timekeeper(seconds(budget), self.spent, trainer.step)
        self.metrics = MetricsFile(run.path / "metrics.jsonl") if self.distributed.is_leader else None

    def fit(self) -> str:
        """Train until the end, a divergence or an interruption, and return the run's status."""
        trainer = self.trainer
        self.callback.on_train_start(trainer)
        if trainer.step == 0:
            # A run that began with other weights must be able to go on without them.
            self._save([*self._epochs_done(-1), *["last"] * (trainer.loaded is not None)])
        while trainer.step < trainer.total_steps:
            epochs_before = trainer.epoch
            names = ["last"] if self._due(trainer.recipe.checkpoint.every) else []
            validates = len(trainer.dataset.val) > 0 and self._due(trainer.recipe.validation.every)
            row = trainer.advance()
            reason = trainer.divergence.find(row)
            if reason or validates or names or trainer.step % trainer.recipe.logging.every == 0:
                self._record(row)
            if reason:
                return self._end_diverged(reason)
            self.callback.on_step(trainer)
            if validates:
                score = self._score("val")
                if reason := trainer.divergence.find(score):
                    return self._end_diverged(reason)
                names += self._update_best(score)
            names += self._epochs_done(epochs_before)
            names += self._plan_anew()
            stopping = self._signal()
            self._save([*names, "last"] if stopping else names)
            if stopping and trainer.step < trainer.total_steps:
                reason = f"{signal.Signals(stopping).name} at step {trainer.step}"
                return self._end("interrupted", step=trainer.step, reason=reason, signal=stopping)
        if trainer.divergence.skipped >= trainer.total_steps:  # too few steps for the check of each one
            return self._end_diverged("no step had a finite gradient")
        return self._end("finished", step=trainer.step, results=self._results())

    def _plan_anew(self) -> list[str]:
        """Fit the number of steps to the time that is left; a new one is saved at once, for a run that is resumed.

        Not while steps are cheaper than they will be: with smaller images, or before a late step rule.
        """
        trainer, timekeeper = self.trainer, self.timekeeper
        is_uniform = trainer.is_late and trainer.sizes(trainer.course(trainer.step)) == trainer.sizes.full
        if timekeeper is None or trainer.step == trainer.total_steps:
            return []
        if not is_uniform:
            timekeeper.restart(trainer.step)
            return []

        def plan() -> int | None:
            due = timekeeper.is_due(trainer.step, trainer.total_steps)
            return timekeeper.plan(trainer.step, trainer.total_steps, self.seconds_of_scores) if due else None

        total = self.distributed.leader_only(plan)
        if total is None:
            return []
        trainer.plan_anew(total)
        return ["last"]

    @property
    def seconds_of_scores(self) -> float:
        """Seconds that the last validation and the scores of test take, by the speed of validation; 0 before one."""
        counts = image_counts(self.trainer.dataset)
        splits = [split for split in ("val", "test") if counts[split] and (split == "val" or self.trainer.recipe.test)]
        images = sum(self.trainer.task.evaluation_images(counts, split) for split in splits)
        return images / self.evaluated if self.evaluated else 0.0

    def _end_diverged(self, reason: str) -> str:
        """End the run as diverged; if `last` already holds the bad weights, restore `previous`."""
        kept = False
        if self.distributed.is_leader:
            kept = self.run.checkpoints.withdraw_last(from_step=self.trainer.step - 1)
        return self._end("diverged", step=self.trainer.step, reason=reason, kept_last=kept)

    def _resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        found = self.run.checkpoints.newest_intact()
        if found is not None:
            model, state = found
            self.best, self.failure = state.pop("best"), state.pop("failure", None)
            self.spent, self.evaluated = state.pop("spent", 0.0), state.pop("evaluated", 0.0)
            self.trainer.load_state_dict(model, state)
        elif self.distributed.is_leader and self.run.status.get("step", 0) > 0:  # one was saved
            log.warning("'%s' has no checkpoint to go on from; training starts over.", self.run.path)
        self.distributed.wait()
        if self.distributed.is_leader:
            cut_back(self.run.path / "metrics.jsonl", self.trainer.step)
            self.run.write_status("running", step=self.trainer.step, total_steps=self.trainer.total_steps)

    def _due(self, every: Duration) -> bool:
        """Tell whether the next step completes an interval of this length, or the run."""
        trainer = self.trainer
        interval = max(1.0, in_steps(every, trainer.steps_per_epoch, trainer.course.planned))
        step, tiny = trainer.step + 1, 1e-9
        # A share of the run is one of its plan, however many steps that takes.
        before, after = (trainer.course(at) if is_share(every) else at for at in (step - 1, step))
        return step == trainer.total_steps or int(after / interval + tiny) > int(before / interval + tiny)

    def _signal(self) -> int:
        """Return the signal received by any process, or 0, so that all of them stop after the same step."""
        mine = int(self.interrupt.signal or 0)
        return max(self.distributed.gather(lambda: mine)) if self.distributed.any(mine > 0) else 0

    def _update_best(self, score: Row) -> list[str]:
        """Record the score if it is the best so far; return the names of the checkpoints to write for it."""
        if not self.trainer.task.improves(score, self.best):
            return []
        self.best = score
        return ["best"]

    def _score(self, split: str) -> Row:
        started = time.perf_counter()
        trainer = self.trainer
        task = trainer.task
        with trainer.evaluation() as network:
            self.distributed.share_buffers(network)
            score = task.evaluate(network, trainer.dataset, split, self.distributed)
        rate = self.evaluated = score["count"] / (time.perf_counter() - started)
        row = {
            "kind": split,
            "step": trainer.step,
            "epoch": trainer.epoch,
            "loss": score[task.loss_metric],
            "losses": {task.loss_metric: score[task.loss_metric]},
            "lr": trainer.rate(trainer.step - 1),
            "grad_norm": None,
            **score,
        }
        self._record({**row, "timing": {"images_per_second": round(rate, 1)}})
        return row

    def _results(self) -> dict[str, Any]:
        """Return the validation and test scores of the best checkpoint; test images are read only here."""
        rows: dict[str, Row] = {}
        if self.best is not None:
            self.distributed.wait()
            rows["val"] = self._restore_best(self.best)
        if self.trainer.recipe.test and len(self.trainer.dataset.test):
            rows["test"] = {**self._score("test"), "step": rows.get("val", {}).get("step", self.trainer.step)}
        of_training = {"kind", "epoch", "loss", "losses", "lr", "grad_norm"}
        return {split: {key: row[key] for key in row if key not in of_training} for split, row in rows.items()}

    def _restore_best(self, best: Row) -> Row:
        """Load the best weights and return their score; if they are damaged, score the last ones instead."""
        try:
            self.trainer.load_exported(self.run.checkpoints.read_model("best"))
            return best
        except RunError as error:
            if self.distributed.is_leader:
                log.warning("%s The results are those of the last weights.", error)
            return self._score("val")

    def _record(self, row: Row) -> None:
        if self.metrics is not None:
            self.metrics.append(row)
        self.callback.on_row(row)
        failure = self.trainer.task.find_failure(row, self.trainer.course.share(row["step"]))
        if failure is not None and self.failure is None:
            self.failure = f"{failure} at step {row['step']}"
            self.callback.on_failure(self.failure)

    def _save(self, names: list[str]) -> None:
        if not names or not (self.distributed.is_leader or self.trainer.shards):
            return
        model, state = self.trainer.exported_state(), {**self.trainer.state_dict(), "best": self.best}
        if self.metrics is None:
            return
        self.metrics.sync()
        if self.failure is not None:
            state["failure"] = self.failure
        if self.timekeeper is not None:
            state |= {"spent": self.timekeeper.spent, "evaluated": self.evaluated}
        # `last` is written last: after a kill in between, the step that leads to the others runs again.
        ordered = sorted(set(names), key=lambda name: (name == "last", name))
        self.run.checkpoints.save(ordered, model, state, self.made_with)
        self.run.write_status("running", step=self.trainer.step, total_steps=self.trainer.total_steps)

    def _epochs_done(self, before: int) -> list[str]:
        """Notify the callback of epochs the last step completed; return the names of checkpoints to keep for them."""
        done = range(before + 1, self.trainer.epoch + 1)
        for epoch in done:
            self.callback.on_epoch(self.trainer, epoch)
        return [f"epoch-{epoch}" for epoch in done if epoch in self.trainer.recipe.checkpoint.keep_epochs]

    def _end(self, status: str, **fields: Any) -> str:
        if self.distributed.is_leader and self.metrics is not None:
            self.metrics.sync()
            self.metrics.close()
            self.run.write_status(status, **fields, **({"failure": self.failure} if self.failure else {}))
        self.callback.on_train_end(status)
        return status
