"""A training session: from the start or a checkpoint until the run ends or is interrupted.

After every step come, in this order: row, divergence check, validation, checkpoint, interruption. Rows are written
before the checkpoint that covers them, so truncating the metrics to a checkpoint's step gives exactly what an
uninterrupted run would have written by then.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from vitclinic._core.callback import Callback
from vitclinic.training.interrupts import Interrupt
from vitclinic.training.optimizer import Duration, in_steps
from vitclinic.training.run import MetricsFile, Row, Run, cut_back
from vitclinic.training.trainer import Trainer


class Session:
    """The training loop around a `Trainer`, which writes metrics, checkpoints and status to the run directory."""

    def __init__(self, run: Run, trainer: Trainer, callback: Callback, interrupt: Interrupt) -> None:
        self.run, self.trainer, self.interrupt = run, trainer, interrupt
        self.distributed = trainer.distributed
        self.callback = callback if self.distributed.is_leader else Callback()
        self.best: dict[str, Any] | None = None
        self._resume()
        self.metrics = MetricsFile(run.path / "metrics.jsonl") if self.distributed.is_leader else None

    def fit(self) -> str:
        """Train until the end, a divergence or an interruption, and return the run's status."""
        trainer = self.trainer
        self.callback.on_train_start(trainer)
        if trainer.step == 0:
            self._save(self._epochs_done(-1))
        while trainer.step < trainer.total_steps:
            epochs_before = trainer.epoch
            names = ["last"] if self._due(trainer.recipe.checkpoint.every) else []
            validates = len(trainer.dataset.val) > 0 and self._due(trainer.recipe.validation.every)
            row = trainer.advance()
            reason = trainer.find_divergence(row)
            if reason or validates or names or trainer.step % trainer.recipe.logging.every == 0:
                self._record(row)
            if reason:
                return self._end_diverged(reason)
            self.callback.on_step(trainer)
            if validates:
                score = self._score("val")
                if reason := trainer.find_divergence(score):
                    return self._end_diverged(reason)
                names += self._update_best(score)
            names += self._epochs_done(epochs_before)
            stopping = self._signal()
            self._save([*names, "last"] if stopping else names)
            if stopping and trainer.step < trainer.total_steps:
                reason = f"{signal.Signals(stopping).name} at step {trainer.step}"
                return self._end("interrupted", step=trainer.step, reason=reason, signal=stopping)
        return self._end("finished", step=trainer.step, results=self._results())

    def _end_diverged(self, reason: str) -> str:
        """End the run as diverged; if `last` already holds the bad weights, restore `previous`."""
        if self.distributed.is_leader:
            self.run.checkpoints.withdraw_last(from_step=self.trainer.step - 1)
        return self._end("diverged", step=self.trainer.step, reason=reason)

    def _resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        found = self.run.checkpoints.newest_intact()
        if found is not None:
            model, state = found
            self.best = state.pop("best")
            self.trainer.load_state_dict(model, state)
        self.distributed.wait()
        if self.distributed.is_leader:
            cut_back(self.run.path / "metrics.jsonl", self.trainer.step)
            self.run.write_status("running", step=self.trainer.step, total_steps=self.trainer.total_steps)

    def _due(self, every: Duration) -> bool:
        """Tell whether the next step completes an interval of this length, or the run."""
        trainer = self.trainer
        interval = max(1.0, in_steps(every, trainer.steps_per_epoch, trainer.total_steps))
        step, tiny = trainer.step + 1, 1e-9
        return step == trainer.total_steps or int(step / interval + tiny) > int((step - 1) / interval + tiny)

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
        self.distributed.share_buffers(trainer.evaluation_network)
        task = trainer.task
        score = task.evaluate(trainer.evaluation_network, trainer.dataset, split, self.distributed)
        rate = score["count"] / (time.perf_counter() - started)
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
            self.trainer.evaluation_network.load_state_dict(self.run.checkpoints.read_model("best"))
            rows["val"] = self.best
        if self.trainer.recipe.test and len(self.trainer.dataset.test):
            rows["test"] = {**self._score("test"), "step": rows.get("val", {}).get("step", self.trainer.step)}
        of_training = {"kind", "epoch", "loss", "losses", "lr", "grad_norm"}
        return {split: {key: row[key] for key in row if key not in of_training} for split, row in rows.items()}

    def _record(self, row: Row) -> None:
        if self.metrics is not None:
            self.metrics.append(row)
        self.callback.on_row(row)

    def _save(self, names: list[str]) -> None:
        if not names or not self.distributed.is_leader or self.metrics is None:
            return
        self.metrics.sync()
        state = {**self.trainer.state_dict(), "best": self.best}
        # `last` is written last: after a kill in between, the step that leads to the others runs again.
        ordered = sorted(set(names), key=lambda name: (name == "last", name))
        self.run.checkpoints.save(ordered, self.trainer.evaluation_network.state_dict(), state)
        self.run.write_status("running", step=self.trainer.step)

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
            self.run.write_status(status, **fields)
        self.callback.on_train_end(status)
        return status
