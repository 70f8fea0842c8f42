"""Terminal output of a run: a progress bar (or a line per validation if not a terminal), then a table of results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import ProgressColumn, Task, TaskID, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitclinic._core import callback
from vitclinic._core.callback import Callback
from vitclinic.tasks import Metric, headlines
from vitclinic.training.run import Run
from vitclinic.training.trainer import Trainer


class Display(callback.Display, Callback):
    """A callback that shows reading and training on `console`; use it as a context manager around `train`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.completed:.0f}/{task.total:.0f}", _Facts(), TimeRemainingColumn())
        self.training: TaskID | None = None
        self.batch_size = 0
        self.metrics: list[Metric] = []
        self.started = self.announced = 0.0

    def on_progress(self, what: str, done: float, total: float) -> None:
        self.advance(f"{what} images", done, total)

    def on_train_start(self, trainer: Trainer) -> None:
        self.batch_size = trainer.recipe.batch_size
        self.metrics = headlines(trainer.task)
        network, data = trainer.network, trainer.dataset
        count = sum(p.numel() for p in network.parameters())
        resumed = f", resumed at step {trainer.step}" if trainer.step else ""
        self.console.print(
            f"[bold]{escape(trainer.recipe.model.name)}[/] ({count / 1e6:.2f} M parameters) on"
            f" [bold]{escape(data.name)}[/]: {len(data.train)} training images, {len(data.classes)} classes,"
            f" {data.size[0]} x {data.size[1]}; {trainer.total_steps} steps{resumed}",
            soft_wrap=True,
        )
        if data.skipped:
            self.console.print(
                f"[yellow]skipped {len(data.skipped)} unreadable images[/], first: {escape(data.skipped[0])}",
                soft_wrap=True,
            )
        for notice in trainer.notices:
            self.console.print(f"[yellow]note:[/] {escape(notice)}", soft_wrap=True)
        if trainer.recipe.batch_size > len(data.train):
            self.console.print(
                f"[yellow]batch_size {trainer.recipe.batch_size} exceeds the {len(data.train)} training images:[/]"
                " some images repeat within a step"
            )
        self.training = self.bar.add_task("training", total=trainer.total_steps, completed=trainer.step)
        self.started = time.monotonic()

    def on_row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "train" and self.training is not None:
            rate = row["timing"]["images_per_second"]
            self.bar.update(self.training, loss=row["loss"], rate=rate, epoch=row["epoch"])
        elif row["kind"] == "val":
            shown = [f"{metric.name} {metric.show(row[metric.name])}" for metric in self.metrics]
            if self.training is not None:
                self.bar.update(self.training, val=self.metrics[0].show(row[self.metrics[0].name]))
            if not self.console.is_terminal:
                where = f"epoch {row['epoch']}, step {row['step']}"
                self.console.print(f"{where}: val {', '.join(shown)}", soft_wrap=True)

    def on_step(self, trainer: Trainer) -> None:
        if self.training is not None:
            self.bar.update(self.training, completed=trainer.step)

    def on_train_end(self, status: str) -> None:
        self.bar.stop()


class _Facts(ProgressColumn):
    """A progress column: epoch, loss, first metric of the last validation, images per second."""

    def render(self, task: Task) -> Text:
        fields = task.fields
        parts = []
        if "epoch" in fields:
            parts.append(f"epoch {fields['epoch']}")
        if "loss" in fields:
            parts.append(f"loss {fields['loss']:.3f}")
        if "val" in fields:
            parts.append(f"val {fields['val']}")
        if "rate" in fields:
            parts.append(f"{fields['rate']:.0f} images/s")
        return Text("  ".join(parts), style="cyan")


def show_result(run: Run, console: Console) -> None:
    """Print how a run ended and where to find it."""
    status = run.status
    path = escape(str(run.path))
    if status["status"] != "finished":
        console.print(f"[yellow]{status['status']}[/]: {escape(status.get('reason', ''))}", soft_wrap=True)
        if status["status"] == "interrupted":
            console.print(f"saved; continue with: vitclinic train --resume {path}", soft_wrap=True)
        else:
            kept = "the last good checkpoint is kept" if run.checkpoints.names() else "before any checkpoint"
            console.print(f"recorded in {path}; {kept}", soft_wrap=True)
        return
    console.print(_results_table(run))
    console.print(f"run directory: [bold]{path}[/]", soft_wrap=True)
    console.print(f'use it: network = vitclinic.load_model("{path}")', soft_wrap=True)


def _results_table(run: Run) -> Table:
    table = Table(title="results", title_justify="left")
    metrics = headlines(run.recipe.task)
    table.add_column("split")
    for metric in metrics:
        for name in [metric.name, "95% interval"] if metric.interval else [metric.name]:
            table.add_column(name, justify="right")
    table.add_column("images", justify="right")
    for split, score in run.results.items():
        cells = [f"{split} (best, at step {score['step']})" if split == "val" else split]
        for metric in metrics:
            cells += [metric.show(score[metric.name]), *([metric.show_interval(score)] if metric.interval else [])]
        table.add_row(*cells, str(score["count"]))
    return table
