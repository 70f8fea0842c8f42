"""An examination while it runs: on a terminal a table that fills, in a pipe a line for each thing that is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitclinic.clinic.watching import Schedule, Step, Watcher
from vitclinic.durations import spoken
from vitclinic.measurement import Measurement
from vitclinic.probes import Subject

_STATUS = {
    "ok": "[green]done[/]",
    "not_converged": "[yellow]not converged[/]",
    "does_not_apply": "[dim]does not apply[/]",
    "failed": "[red]failed[/]",
}


class Display(Watcher):
    """Shows reading and measuring on `console`. Use as a context manager around an examination."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.schedule: Schedule | None = None
        self.cells: dict[tuple[str, int], str] = {}
        self.started: dict[tuple[str, int], float] = {}
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} images"),
            TimeRemainingColumn(),
            console=console,
        )
        self.tasks: dict[str, TaskID] = {}
        self.live = Live(get_renderable=self._shown, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def on_reading(self, what: str, done: int, total: int) -> None:
        self.on_progress(what, done, total)

    def on_schedule(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.cells = {(step.label, step.place): "" for step in schedule.steps}
        self._say(_headline(schedule))
        if not self.console.is_terminal:
            for line in _plan_lines(schedule):
                self._say(line)
        if schedule.left_out:
            self._say(_left_out(schedule))

    def on_step(self, step: Step) -> None:
        self.cells[step.label, step.place] = "[bold]running[/]"
        self.started[step.label, step.place] = time.monotonic()

    def on_progress(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(escape(what), total=total)
        self.bar.update(self.tasks[what], completed=done, total=total, visible=done < total)

    def on_measurement(self, step: Step, measurement: Measurement) -> None:
        seconds = time.monotonic() - self.started[step.label, step.place]
        self.cells[step.label, step.place] = f"{_STATUS[measurement.status]} {seconds:.0f} s"
        for task in self.tasks.values():
            self.bar.update(task, visible=False)
        if not self.console.is_terminal:
            status = measurement.status.replace("_", " ")
            self._say(f"{measurement.probe} ({escape(step.subject.name)}): {status}, {seconds:.1f} s")

    def on_skipped(self, step: Step, reason: str) -> None:
        self.cells[step.label, step.place] = "[yellow]skipped[/]"
        names = ", ".join(probe.name for probe in step.probes)
        self._say(f"[yellow]{names} left out[/] ({escape(step.subject.name)}): {escape(reason)}")

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False)

    def _shown(self) -> Group | Progress:
        if self.schedule is None or not self.cells:
            return self.bar
        table = Table(box=None, header_style="bold")
        table.add_column("probe", no_wrap=True)
        for name in names_of(self.schedule.subjects):
            table.add_column(escape(name), overflow="fold")
        table.add_column("estimate", justify="right")
        for label in dict.fromkeys(label for label, _ in self.cells):
            estimate = sum(step.seconds for step in self.schedule.steps if step.label == label)
            row = (self._cell(label, place) for place in range(len(self.schedule.subjects)))
            table.add_row(label, *row, spoken(estimate))
        return Group(table, self.bar)

    def _cell(self, label: str, place: int) -> str:
        if (label, place) not in self.cells:
            return "[dim]stored[/]"
        text = self.cells[label, place]
        running = text == "[bold]running[/]"
        return f"{text} {time.monotonic() - self.started[label, place]:.0f} s" if running else text


def names_of(subjects: Sequence[Subject]) -> list[str]:
    """The networks' names, with numbers where they are the same."""
    names = [subject.name for subject in subjects]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names, 1)]


def _headline(schedule: Schedule) -> str:
    """What is examined, and how long that takes."""
    subjects = schedule.subjects
    names = ", ".join(f"[bold]{escape(name)}[/]" for name in names_of(subjects))
    seen = list(dict.fromkeys(f"{_images(each)} of [bold]{escape(each.dataset.name)}[/]" for each in subjects))
    if not schedule.steps:
        return f"{names}: all is stored"
    within = "" if schedule.budget is None else f" of a budget of {spoken(schedule.budget)}"
    stored = sum(map(len, schedule.stored))
    known = f"; {stored} measurement{'s' * (stored != 1)} from before" if stored else ""
    return f"{names} on {' and '.join(seen)}: about {spoken(schedule.seconds)}{within}{known}"


def _plan_lines(schedule: Schedule) -> list[str]:
    lines = []
    for step in schedule.steps:
        probes = ", ".join(probe.name for probe in step.probes)
        views = [probe.view(step.subject) for probe in step.probes[:1]]
        whom = f" ({escape(step.subject.name)})" if len(schedule.subjects) > 1 else ""
        lines.append(f"  {probes}{whom} on {_images(views[0])}: about {spoken(step.seconds)}")
    return lines


def _left_out(schedule: Schedule) -> str:
    rest = ", ".join(f"{name} (at least {spoken(seconds)})" for name, seconds in schedule.left_out.items())
    names = ",".join(name for name in schedule.left_out if name != "shared pass")
    how = f"a longer --budget{f', or --probes {names}' * bool(names)}"
    return f"[yellow]left out for want of time[/]: {rest}; for these, {how}"


def _images(subject: Subject) -> str:
    return f"{len(subject)} {subject.split} image{'s' * (len(subject) != 1)}"
