"""Who is told what an examination does, and what there is to tell: the steps that it will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vitclinic._core.records import Measurement
from vitclinic.probes import Probe, StreamingProbe, Subject


@dataclass(frozen=True)
class Step:
    """One thing to do: the pass that streaming probes share, or one other probe, on one of the subjects."""

    place: int
    """Of the subject among all."""
    subject: Subject
    probes: Sequence[Probe]
    seconds: float
    """What it will take, estimated; NaN if unknown."""

    @property
    def label(self) -> str:
        return "shared pass" if isinstance(self.probes[0], StreamingProbe) else self.probes[0].name


@dataclass(frozen=True)
class Schedule:
    """All steps, in order, and what will not be done."""

    subjects: Sequence[Subject]
    steps: Sequence[Step]
    stored: Sequence[Sequence[str]]
    """Of each subject, the probes whose measurements are there already."""
    budget: float | None = None
    left_out: Mapping[str, float] = field(default_factory=dict)
    """Probes that do not fit into the budget, with the seconds that the cheapest form of each would take."""

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


class Watcher:
    """Told what goes on; the command line's display is one."""

    def on_reading(self, what: str, done: int, total: int) -> None:
        """Images are being decoded."""

    def on_schedule(self, schedule: Schedule) -> None:
        """This is going to be done."""

    def on_step(self, step: Step) -> None:
        """A step begins."""

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Images have passed through the network."""

    def on_measurement(self, step: Step, measurement: Measurement) -> None:
        """A measurement is made and stored."""

    def on_skipped(self, step: Step, reason: str) -> None:
        """A step is not taken."""
