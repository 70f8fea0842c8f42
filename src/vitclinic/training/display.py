"""Terminal output of a run: a progress bar (or a line per validation if not a terminal), then a table of results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import ProgressColumn, Task, TaskID, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitclinic import tasks
from vitclinic._core import callback
from vitclinic._core.callback import Callback
from vitclinic.tasks import Classification, Metric, headlines
from vitclinic.tasks.representation import Representation
from vitclinic.training.plan import HOW, PlannedGroup, RunPlan
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
            f" [bold]{escape(data.name)}[/]: {len(data.train)} training"
            f" image{'s' * (len(data.train) != 1)}, {len(data.classes)} class{'es' * (len(data.classes) != 1)},"
            f" {data.size[0]} x {data.size[1]};"
            f" {trainer.total_steps} step{'s' * (trainer.total_steps != 1)}{resumed}",
            soft_wrap=True,
        )
        if data.skipped:
            self.console.print(
                f"[yellow]left out: {len(data.skipped)}[/], first: {escape(data.skipped[0])}",
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

    def on_failure(self, sentence: str) -> None:
        self.console.print(f"[red]warning:[/] {escape(sentence)}", soft_wrap=True)

    def on_step(self, trainer: Trainer) -> None:
        if self.training is not None:
            self.bar.update(self.training, completed=trainer.step, total=trainer.total_steps)

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


def _name_uses(task: tasks.Task, word: str) -> list[str]:
    """Return the commands that use a run of this task."""
    examine = f"vitclinic examine {word}"
    if isinstance(task, Representation):
        return [f"vitclinic features {word} -o FILE.parquet", examine]
    if isinstance(task, Classification) or task.target in ("mask", "objects"):
        return [f"vitclinic predict {word} IMAGES", examine]
    return [f"vitclinic predict {word} IMAGES --ask QUESTION", examine] if task.target == "questions" else [examine]


def show_result(run: Run, console: Console) -> None:
    """Print how a run ended and where to find it."""
    status = run.status
    path, word = escape(str(run.path)), escape(shlex.quote(str(run.path)))  # commands are there to be copied
    if status["status"] != "finished":
        console.print(f"[yellow]{status['status']}[/]: {escape(status.get('reason', ''))}", soft_wrap=True)
        if status["status"] == "interrupted":
            console.print(f"saved; continue with: vitclinic train --resume {word}", soft_wrap=True)
        else:
            good = status.get("kept_last", bool(run.checkpoints.names()))
            kept = "the last good checkpoint is kept" if good else "before any good checkpoint"
            console.print(f"recorded in {path}; {kept}", soft_wrap=True)
        return
    if "failure" in status:
        console.print(f"[red]warning:[/] {escape(status['failure'])}", soft_wrap=True)
    if run.results:  # else there was neither val nor test
        console.print(_results_table(run))
    console.print(f"run directory: [bold]{path}[/]", soft_wrap=True)
    console.print("next:")
    for command in _name_uses(run.recipe.task, word):  # a line each, to be copied
        console.print(f"  {command}", soft_wrap=True)
    console.print(f'in Python: network = vitclinic.load_model("{path}")', soft_wrap=True)


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


_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_amount(value: float, unit: str = "") -> str:
    """Write a number with three digits and the prefix of its size.

    Example:
        >>> format_amount(86_567_656), format_amount(1.27e20), format_amount(12, "B")
        ('86.6 M', '127 E', '12 B')
    """
    size, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0]), (1.0, ""))
    digits = f"{value / size:#.3g}".rstrip(".") if prefix else f"{value:g}"
    return f"{digits} {prefix}{unit}".rstrip()


def show_plan(plan: RunPlan, console: Console) -> None:
    """Print the plan of a run, one line for each part."""
    for name, text in describe_plan(plan).items():
        console.print(f"[bold]{name:<13}[/]{escape(text)}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"[yellow]{'note':<13}[/]{escape(note)}", soft_wrap=True)


def describe_plan(plan: RunPlan) -> dict[str, str]:
    """Return the lines of a plan: name and text."""
    recipe = plan.recipe
    counts = ", ".join(f"{plan.images[split]:,} {split}" for split in ("train", "val", "test") if plan.images[split])
    absent = "" if plan.data_is_here else " (not here; its published facts)"
    treated = [f"{name} ({_describe_options(options)})" for name, options in plan.treatments.items()]
    task = recipe.resolved_task
    loss = f", {task.loss.name} loss" if isinstance(task, Classification) else ""
    averaged = f", weights averaged with decay {recipe.ema:g}" if recipe.ema else ""
    return {
        "data": f"{plan.data}{absent}: {counts} images; {plan.classes:,} classes,"
        f" {plan.channels} x {plan.size[0]} x {plan.size[1]}",
        "network": _describe_network(plan),
        "treatments": "; ".join(treated) or "none",
        "task": f"{task.name}{loss}",
        "augmentation": _describe_augmentation(plan.augmentation),
        "optimizer": _describe_optimizer(plan),
        "schedule": _describe_schedule(plan),
        "length": _describe_length(plan),
        "precision": f"{recipe.precision}{averaged}",
        "FLOPs": _describe_flops(plan),
        "memory": _describe_memory(plan),
    }


def _describe_network(plan: RunPlan) -> str:
    config = plan.recipe.model
    keywords = "".join(f", {name} {value}" for name, value in config.keywords.items())
    trained = "all trained" if plan.trainable == plan.parameters else f"{plan.trainable:,} of them trained"
    added = f"; losses add {plan.objective_parameters:,}" if plan.objective_parameters else ""
    start = ", from published weights" if config.pretrained else ""
    return f"{config.name} ({plan.network}{keywords}{start}): {plan.parameters:,} parameters, {trained}{added}"


def _describe_options(options: Mapping[str, Any]) -> str:
    """Write options in a line, without those that are not set."""
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None) or "no options"


_OFF = {"mix_probability": 1.0, "repeats": 1}
"""Values of an augmentation's parts that change nothing, besides none, off and 0."""


def _describe_augmentation(parts: Mapping[str, Any]) -> str:
    """Write the level of an augmentation, and those of its parts that are on."""
    on = {name: value for name, value in parts.items() if value not in (None, "off", 0, _OFF.get(name))}
    level = on.pop("level")
    return f"{level}: {_describe_options(on)}" if on else str(level)


def _describe_optimizer(plan: RunPlan) -> str:
    config, clip = plan.recipe.optimizer, plan.recipe.clip
    momentum = f"momentum {config.momentum:g}" if config.name in ("sgd", "rmsprop") else f"betas {config.betas}"
    clipped = "nothing clipped" if clip is None else f"clipped at {clip:g}"
    groups = "; ".join(_describe_group(group) for group in plan.optimizer)
    return f"{config.name}, lr {config.lr:g}, {momentum}, {clipped}; {groups}"


def _describe_group(group: PlannedGroup) -> str:
    decay = f"weight decay {group.weight_decay:g}" if group.weight_decay else "no weight decay"
    return f"{decay} on {group.parameters:,} parameters in {group.tensors} tensors"


def _describe_schedule(plan: RunPlan) -> str:
    schedule = plan.recipe.schedule
    warmup = str(schedule.warmup) if plan.warmup_steps is None else f"{plan.warmup_steps:,.0f} steps"
    fall = "" if schedule.name == "constant" else f" to {schedule.final * plan.recipe.optimizer.lr:g}"
    return f"{warmup} of warm-up, then {schedule.name}{fall}"


def _describe_length(plan: RunPlan) -> str:
    recipe = plan.recipe
    accumulated = f", {recipe.accumulate} x {plan.micro_batch:,} at a time" if recipe.accumulate > 1 else ""
    batch = f"{recipe.batch_size:,} images{accumulated}"
    if plan.steps is None or plan.images_seen is None:
        return f"{recipe.max_time}, in steps of {batch}; how many fit is measured when the run starts"
    epochs = plan.steps / plan.steps_per_epoch
    counted = f"{epochs:.4g} epoch{'' if epochs == 1 else 's'}"
    return f"{plan.steps:,} steps of {batch}: {counted}, {plan.images_seen:,} images seen"


def _describe_flops(plan: RunPlan) -> str:
    if plan.forward_flops is None or plan.step_flops is None:
        return "not known"
    total = "" if plan.total_flops is None else f"; {format_amount(plan.total_flops)} in all"
    passes = f" x {plan.passes:.3g} passes" if plan.passes != 1 else ""
    return (
        f"{format_amount(plan.forward_flops)} for the forward pass of an image; {format_amount(plan.step_flops)} a"
        f" step (3 x forward{passes} x {plan.recipe.batch_size:,} images){total}"
    )


def _describe_memory(plan: RunPlan) -> str:
    memory = plan.memory
    parts = {
        "weights": memory.weights,
        "averaged weights": memory.averaged,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "step rule": memory.step_rule,
        "images": memory.images,
        f"activations of {memory.pass_images:,} images": memory.activations,
    }
    listed = " + ".join(f"{name} {format_amount(value, 'B')}" for name, value in parts.items() if value)
    fewer = "" if memory.pass_images < plan.micro_batch else "; accumulate=N, or N processes, divide them by N"
    traced = "" if memory.activations is None else f" (activations: {HOW}{fewer})"
    counts = [] if memory.gathered is None else [count for count in (2, 4, 8) if not plan.micro_batch % count]
    each = [f"about {format_amount(memory.of_process(count), 'B')} in each of {count}" for count in counts]
    shared = f"; with parallel=fsdp {', '.join(each)}" if each else ""
    return f"{format_amount(memory.total, 'B')} in one process: {listed}{traced}{shared}"
