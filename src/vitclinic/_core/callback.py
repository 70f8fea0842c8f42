"""Callbacks: how progress displays, loggers and a user's own code follow long work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitclinic._core.records import Measurement
    from vitclinic.exam.schedule import Schedule, Step
    from vitclinic.experiments.prescribe.arms import Arm
    from vitclinic.experiments.prescribe.ledger import DecidedStage
    from vitclinic.experiments.prescribe.plan import Stage
    from vitclinic.experiments.prescribe.prescription import TriedStage
    from vitclinic.experiments.runner import Outcome
    from vitclinic.training.trainer import Trainer


class Callback:
    """Override the hooks you need. A callback may look at what it is given and must not change it.

    Example:
        >>> class Print(Callback):
        ...     def on_row(self, row):
        ...         print(row["step"], row["loss"])
    """

    def on_progress(self, what: str, done: float, total: float) -> None:
        """Something long is `done` so far of `total`: images read, images passed through a network, runs trained."""

    # Training

    def on_train_start(self, trainer: Trainer) -> None:
        """Training is about to begin, or to go on after a resume."""

    def on_step(self, trainer: Trainer) -> None:
        """A step is done."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """`epoch` epochs are done; 0 is before the first step."""

    def on_row(self, row: Mapping[str, Any]) -> None:
        """A row was added to the metrics: of kind train, val or test."""

    def on_train_end(self, status: str) -> None:
        """Training has ended: finished, interrupted or diverged."""

    # Exams

    def on_schedule(self, schedule: Schedule) -> None:
        """An exam is about to begin, and this is what it will do."""

    def on_exam_step(self, step: Step) -> None:
        """A probe, or the pass that streaming probes share, is about to begin."""

    def on_measurement(self, step: Step, measurement: Measurement) -> None:
        """A measurement was made and stored."""

    def on_skip(self, step: Step, reason: str) -> None:
        """A step of the schedule is not taken."""

    # Studies and prescriptions

    def on_run(self, outcome: Outcome) -> None:
        """One of many runs has ended, or was found ended."""

    def on_trial_plan(
        self, plan: Sequence[Stage], arms: Sequence[Arm], left_out: Mapping[str, str], used: float, budget: float
    ) -> None:
        """A prescription is about to begin, or to go on, and this is what it will try."""

    def on_stage(self, decided: DecidedStage) -> None:
        """A rung of trials, or the final comparison, begins."""

    def on_tried(self, tried: TriedStage, kept: Sequence[str]) -> None:
        """A rung of trials has ended; the arms in `kept` go on."""


class CallbackList(Callback):
    """Several callbacks as one: each hook is called on all of them, in their order.

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

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        for hook in (name for name in vars(Callback) if name.startswith("on_")):
            setattr(self, hook, partial(self._tell, hook))

    def _tell(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*arguments)
