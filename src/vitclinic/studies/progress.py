"""What a person sees of a study that goes on: one bar for all its runs, with the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from vitclinic.studies.runner import Outcome, Watcher


class Display(Watcher):
    """Shows on `console` how far a study is. Use as a context manager around `study`."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task: TaskID | None = None
        self.left = TimeLeft()
        self.diverged = self.failed = 0

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def on_outcome(self, outcome: Outcome) -> None:
        self.diverged += outcome.status == "diverged"
        self.failed += outcome.status == "failed"

    def on_progress(self, done: float, total: int) -> None:
        if self.task is None:
            self.task = self.bar.add_task("", total=total, left="")
        words = [f"run {min(int(done) + 1, total)} of {total}"]
        words += [f"{self.diverged} diverged"] * (self.diverged > 0) + [f"{self.failed} failed"] * (self.failed > 0)
        left = self.left.after(done, total, time.monotonic())
        told = "" if left is None else f"about {written(left)} left"
        self.bar.update(self.task, completed=done, total=total, description=", ".join(words), left=told)


class TimeLeft:
    """How long the rest will take, by what has been trained so far.

    A run that was found ended, or failed at once, comes whole and in no time: it says nothing of the others' length.

    Example:
        >>> left = TimeLeft()
        >>> [left.after(done, 4, now) for done, now in ((0, 0.0), (1, 0.1), (1.5, 60.1), (2.0, 120.1))]
        [None, None, 300.0, 240.0]
    """

    def __init__(self) -> None:
        self.seconds = self.trained = 0.0
        self.last: tuple[float, float] | None = None

    def after(self, done: float, total: int, now: float) -> float | None:
        """Seconds, or None as long as nothing was trained."""
        if self.last is not None and done - self.last[0] < 1:
            self.trained += done - self.last[0]
            self.seconds += now - self.last[1]
        self.last = done, now
        return round(self.seconds / self.trained * (total - done), 1) if self.trained > 0 else None


def written(seconds: float) -> str:
    """A time as one says it.

    Example:
        >>> written(30), written(600), written(7200), written(400000)
        ('30 s', '10 min', '2.0 h', '4.6 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
