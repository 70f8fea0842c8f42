"""An examination while it runs: on a terminal a table that fills, in a pipe a line for each thing that is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table

from vitclinic._core import callback
from vitclinic._core.callback import Callback, say
from vitclinic._core.memory import format_bytes
from vitclinic._core.records import Finding, Measurement, Status
from vitclinic._core.time import format_duration
from vitclinic.exam.exam import MARK, Exam, all_rows, column_names, key_rows
from vitclinic.exam.timing import Schedule, Step
from vitclinic.probes import Subject, view_of

_STATUS = {"does_not_apply": "dim", "ok": "green", "not_converged": "yellow", "failed": "red"}
"""The colour of each; of a step that has several, the last of these is shown."""
_RUNNING = "[bold]running[/]"


class Display(callback.Display, Callback):
    """Shows reading and measuring on `console`. Use as a context manager around an examination."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.completed:.0f}/{task.total:.0f} images", TimeRemainingColumn())
        self.schedule: Schedule | None = None
        self.cells: dict[tuple[str, int], str] = {}
        self.started: dict[tuple[str, int], float] = {}
        self.statuses: list[Status] = []
        self.live = Live(get_renderable=self._shown, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def on_schedule(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.cells = {(step.label, step.place): "" for step in schedule.steps}
        self.say(_headline(schedule))
        if not self.console.is_terminal:  # where there is one, the table says it
            for line in _plan_lines(schedule):
                self.say(line)
        if schedule.left_out:
            self.say(_list_left_out(schedule))

    def on_exam_step(self, step: Step) -> None:
        self.cells[step.label, step.place] = _RUNNING
        self.started[step.label, step.place] = time.monotonic()
        self.statuses = []

    def on_progress(self, what: str, done: float, total: float) -> None:
        self.advance(escape(what), done, total)

    def on_measurement(self, step: Step, measurement: Measurement) -> None:
        self.statuses.append(measurement.status)
        if len(self.statuses) < len(step.probes):
            return
        seconds = time.monotonic() - self.started[step.label, step.place]
        found = max(self.statuses, key=list(_STATUS).index)
        self.cells[step.label, step.place] = f"[{_STATUS[found]}]{_words(found)}[/] {seconds:.0f} s"
        for task in self.tasks.values():
            self.bar.update(task, visible=False)
        if not self.console.is_terminal:
            estimate = "" if math.isnan(step.seconds) else f" (estimated {step.seconds:.1f} s)"
            self.say(f"{step.label} ({escape(step.subject.name)}): {_words(found)} after {seconds:.1f} s{estimate}")

    def on_skip(self, step: Step, reason: str) -> None:
        self.cells[step.label, step.place] = "[yellow]no time left[/]"

    def _shown(self) -> Group | Progress:
        if self.schedule is None or not self.cells:
            return self.bar
        table = Table(box=None, header_style="bold")
        table.add_column("probe", no_wrap=True)
        for name in column_names(self.schedule.subjects):
            table.add_column(escape(name), overflow="fold")
        table.add_column("estimate", justify="right")
        table.add_column("memory", justify="right")
        for label in dict.fromkeys(step.label for step in self.schedule.steps if step.seconds != 0):
            row = (self._cell(label, place) for place in range(len(self.schedule.subjects)))
            table.add_row(label, *row, *_say_needs(self.schedule, label))
        return Group(table, self.bar)

    def _cell(self, label: str, place: int) -> str:
        if (label, place) not in self.cells:
            return "[dim]stored[/]"
        text = self.cells[label, place]
        return f"{text} {time.monotonic() - self.started[label, place]:.0f} s" if text == _RUNNING else text


def _headline(schedule: Schedule) -> str:
    """Say what is examined, and how long it will take."""
    subjects = schedule.subjects
    names = ", ".join(f"[bold]{escape(name)}[/]" for name in column_names(subjects))
    seen = list(dict.fromkeys(f"{_images(each)} of [bold]{escape(each.dataset.name)}[/]" for each in subjects))
    if not any(step.seconds != 0 for step in schedule.steps):
        return f"{names}: everything that applies has been measured before"
    within = "" if schedule.budget is None else f" of a budget of {format_duration(schedule.budget)}"
    stored = sum(map(len, schedule.stored))
    known = f"; {stored} measurement{'s' * (stored != 1)} from before" if stored else ""
    about = f": about {format_duration(schedule.seconds)}{within}" if math.isfinite(schedule.seconds) else ""
    if schedule.memory is not None:
        known = f"{', ' if about else ': '}{format_bytes(schedule.memory)} of memory at most{known}"
    return f"{names} on {' and '.join(seen)}{about}{known}"


def _plan_lines(schedule: Schedule) -> list[str]:
    """List what takes time, on which images if a probe chooses its own, and how long for all networks."""
    lines = []
    for label in dict.fromkeys(step.label for step in schedule.steps if step.seconds != 0):
        steps = [step for step in schedule.steps if step.label == label and step.seconds != 0]
        probe, subject = steps[0].probes[0], steps[0].subject
        view = view_of(probe, subject)
        which = f" ({', '.join(probe.name for probe in steps[0].probes)})" if label != probe.name else ""
        own = view is not subject or subject is not schedule.subjects[steps[0].place]
        images = f" on {_images(view)}" if own else ""
        needs = ", ".join(need for need in _say_needs(schedule, label) if need)
        lines.append(f"  {label}{which}{images}{f': {needs}' if needs else ''}")
    return lines


def _say_needs(schedule: Schedule, label: str) -> tuple[str, str]:
    """Return the time that steps of this label take together, and the most memory of any; empty if unknown."""
    steps = [step for step in schedule.steps if step.label == label]
    seconds = sum(step.seconds for step in steps)
    memory = max((step.memory for step in steps if step.memory is not None), default=None)
    return (
        format_duration(seconds) if math.isfinite(seconds) else "",
        "" if memory is None else format_bytes(memory),
    )


def _words(status: Status) -> str:
    return "done" if status == "ok" else status.replace("_", " ")


def _list_left_out(schedule: Schedule) -> str:
    rest = ", ".join(
        f"{name} (at least {format_duration(max(1, seconds))})" for name, seconds in schedule.left_out.items()
    )
    return f"[yellow]no time for[/] {rest}: give a longer --budget, or --probes {','.join(schedule.left_out)}"


def _images(subject: Subject) -> str:
    return f"{len(subject)} {subject.split} image{'s' * (len(subject) != 1)}"


_WORDS = {
    "not_converged": ("has not converged", "have not converged"),
    "does_not_apply": ("does not apply", "do not apply"),
    "failed": ("failed", "failed"),
}
_STYLES = {"problem": "bold red", "notice": "bold yellow", "healthy": "bold green"}


def show_exams(exams: Sequence[Exam], console: Console, *, whole: bool = True) -> None:
    """Print the numbers of all exams side by side (the key numbers, or all), findings, and what did not work."""
    rows = all_rows(exams) if whole else key_rows(exams)
    if rows and console.is_terminal:
        _show_table(rows, console)
    elif rows and not console.quiet:
        for row in rows:
            print("\t".join(row), file=console.file)  # not by rich, which makes spaces of tabs
    for name, exam in zip(column_names(exams), exams, strict=True):
        for finding in exam.findings:
            say(console, _in_words(finding, name))
            for line in _command_lines(finding):
                say(console, line)
        for probes, status, reason in _shortcomings(exam, whole):
            words = _WORDS[status][len(probes) > 1]
            say(console, f"[yellow]{', '.join(probes)} {words}[/] ({escape(name)}): {escape(reason)}")
    if missing := list(dict.fromkeys(probe for exam in exams for probe in exam.left_out)):
        names = ", ".join(missing)
        say(console, f"[yellow]not measured, out of time[/]: {names} (give a longer --budget, or name them: --probes)")
    for exam in exams:
        stored = f" ({', '.join(sorted(exam.reused))} from before)" if exam.reused else ""
        say(console, f"all numbers: [bold]{escape(str(exam.folder))}[/]{stored}")
        for probe, folder in exam.pictures.items():
            say(console, f"pictures of {probe}: [bold]{escape(str(folder))}[/]")


def _show_table(rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0]):
        table.add_column(escape(name), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(f"[bold green]{escape(cell)}[/]" if cell.endswith(MARK) else escape(cell) for cell in row))
    console.print(table)
    if any(cell.endswith(MARK) for row in rows for cell in row):
        say(console, f"[dim]{MARK.strip()} better than the others, intervals included[/]")


def _in_words(finding: Finding, name: str) -> str:
    tried = "; ".join(f"{escape(each.treatment)} ({escape(each.paper)})" for each in finding.suggestions)
    return (
        f"[{_STYLES[finding.severity]}]{finding.severity}: {escape(finding.title)}[/] ({escape(name)}):"
        f" {escape(finding.statement)}" + (f" Try {tried}." if tried else "")
    )


def _command_lines(finding: Finding) -> list[str]:
    """Return the commands of a finding, unless there is nothing to treat; a line each, so that it can be copied."""
    if finding.severity == "healthy":
        return []
    lines = [f"  {escape(one.treatment)}: {escape(one.command)}" for one in finding.suggestions if one.command]
    return [*lines, f"  then measure again: {escape(finding.again)}"] if finding.again else lines


def _shortcomings(exam: Exam, whole: bool) -> Iterator[tuple[list[str], str, str]]:
    """Yield (probes, status, reason) of probes without a full result, grouped by reason.

    Unless probes were asked for by name, those that do not apply for a reason of their own are only listed.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for probe, measurement in exam.items():
        if measurement.status != "ok":
            alike.setdefault((measurement.status, str(measurement.reason)), []).append(probe)
    listed: list[str] = []
    for (status, reason), probes in sorted(alike.items(), key=lambda item: list(_WORDS).index(item[0][0])):
        if status == "does_not_apply" and not whole and len(probes) == 1:
            listed += probes
        else:
            yield probes, status, reason
    if listed:
        yield listed, "does_not_apply", "the report says why."


def to_json(exam: Exam) -> dict[str, Any]:
    """Return an exam as JSON data; arrays stay in their files."""
    return {
        "target": exam.name,
        "subject": exam.subject,
        "folder": str(exam.folder),
        "measurements": {probe: _measurement_to_json(measurement, exam, probe) for probe, measurement in exam.items()},
        "findings": [finding.model_dump(mode="json") for finding in exam.findings],
        "left_out": exam.left_out,
    }


def _measurement_to_json(measurement: Measurement, exam: Exam, probe: str) -> dict[str, Any]:
    record = {**measurement.plain(), "file": exam.files[probe].name, "reused": probe in exam.reused}
    if probe in exam.memory:
        record["estimated_memory"] = exam.memory[probe]
    return record | ({"pictures": exam.pictures[probe].name} if probe in exam.pictures else {})
