"""Callbacks, by which progress displays, loggers and user code follow long-running work; and the base of displays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from vitclinic._core.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID

    from vitclinic._core.records import Measurement
    from vitclinic.exam.timing import Schedule, Step
    from vitclinic.experiments.prescribe.arms import Arm
    from vitclinic.experiments.prescribe.ledger import DecidedStage
    from vitclinic.experiments.prescribe.plan import Stage
    from vitclinic.experiments.prescribe.prescription import TriedStage
    from vitclinic.experiments.runner import Outcome
    from vitclinic.training.trainer import Trainer


class Callback:
    """Base of callbacks: override the hooks you need. A callback may read its arguments and must not change them.

    Example:
        >>> class Print(Callback):
        ...     def on_row(self, row):
        ...         print(row["step"], row["loss"])
    """

    def on_progress(self, what: str, done: float, total: float) -> None:
        """Follow a long operation, `done` of `total` so far: images read or passed through a network, runs trained."""

    # Training

    def on_train_start(self, trainer: Trainer) -> None:
        """Act before training begins, or continues after a resume."""

    def on_step(self, trainer: Trainer) -> None:
        """Act after each training step."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """Act after `epoch` epochs; 0 is before the first step."""

    def on_row(self, row: Mapping[str, Any]) -> None:
        """Receive a row that was added to the metrics, of kind train, val or test."""

    def on_failure(self, sentence: str) -> None:
        """Receive what is wrong with a training that goes on, such as features that have collapsed; called once."""

    def on_train_end(self, status: str) -> None:
        """Act after training, with its status: finished, interrupted or diverged."""

    # Exams

    def on_schedule(self, schedule: Schedule) -> None:
        """Receive the schedule of an exam before it begins."""

    def on_exam_step(self, step: Step) -> None:
        """Act before a probe, or the pass that streaming probes share."""

    def on_measurement(self, step: Step, measurement: Measurement) -> None:
        """Receive a measurement that was made and stored."""

    def on_skip(self, step: Step, reason: str) -> None:
        """Receive the reason why a step of the schedule is skipped."""

    # Studies and prescriptions

    def on_run(self, outcome: Outcome) -> None:
        """Receive the outcome of one of many runs, which has ended now or had ended before."""

    def on_trial_plan(
        self, plan: Sequence[Stage], arms: Sequence[Arm], left_out: Mapping[str, str], used: float, budget: float
    ) -> None:
        """Receive the plan of a prescription before it begins or continues."""

    def on_stage(self, decided: DecidedStage) -> None:
        """Act before a rung of trials, or the final comparison."""

    def on_tried(self, tried: TriedStage, kept: Sequence[str]) -> None:
        """Receive the results of a rung of trials; the arms in `kept` continue."""


class CallbackList(Callback):
    """Several callbacks as one: each hook is called on all of them, in order.

    Example:
        >>> class Count(Callback):
        ...     steps = 0
        ...     def on_step(self, trainer):
        ...         self.steps += 1
        >>> one, other = Count(), Count()
        >>> CallbackList([one, other]).on_step(None)
        >>> one.steps, other.steps
        (1, 1)
    """

    def __init__(self, callbacks: Iterable[Callback] | Callback) -> None:
        self.callbacks = tuple(callbacks if isinstance(callbacks, Iterable) else [callbacks])
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise RecipeError(f"'callbacks' has a {type(callback).__name__}; derive it from vitclinic.Callback.")
        for hook in (name for name in vars(Callback) if name.startswith("on_")):
            setattr(self, hook, partial(self._tell, hook))

    def _tell(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*arguments)


class Display:
    """Progress bars and lines on `console`; a context manager around the work.

    Bars are drawn on a terminal only, and vanish at the end.

    Args:
        console: The console to print to.
        columns: Columns to the right of a bar: columns of rich, or their formats.
    """

    def __init__(self, console: Console, *columns: ProgressColumn | str) -> None:
        from rich.progress import BarColumn, Progress  # importing vitclinic does without rich

        self.console = console
        self.bar = Progress(
            "{task.description}",
            BarColumn(bar_width=24),
            *columns,
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def advance(self, what: str, done: float, total: float) -> None:
        """Update the bar of `what`, which is hidden once everything is done."""
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total)
        self.bar.update(self.tasks[what], completed=done, total=total, visible=done < total)

    def say(self, text: str) -> None:
        """Print a line, which may contain rich markup."""
        say(self.console, text)


def say(console: Console, text: str) -> None:
    """Print a line, which may contain rich markup; the terminal wraps it."""
    console.print(text, soft_wrap=True, highlight=False)
