"""What a person sees of exams: a progress bar on a terminal, then one table with a column for each network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitclinic.clinic.examine import Exam, Watcher
from vitclinic.measurement import Measurement, Scalar
from vitclinic.probes import Probe, Subject, seen_by

_WORDS = {
    "not_converged": "has not converged",
    "does_not_apply": "does not apply",
    "do_not_apply": "do not apply",
    "failed": "failed",
}


class Display(Watcher):
    """Shows reading and measuring on `console`. Use as a context manager around `examine`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} images"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def on_reading(self, what: str, done: int, total: int) -> None:
        self.on_progress(what, done, total)

    def on_subject(self, subject: Subject, to_do: Sequence[Probe], seconds: float) -> None:
        names = []
        for probe in to_do:
            view = seen_by(probe, subject)
            names.append(probe.name if view is subject else f"{probe.name} (on {_images(view)})")
        self.console.print(
            f"[bold]{escape(subject.name)}[/] on {_images(subject)} of [bold]{escape(subject.dataset.name)}[/]:"
            f" {', '.join(names)}, about {_duration(seconds)}",
            soft_wrap=True,
        )

    def on_progress(self, what: str, done: int, total: int) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(escape(what), total=total)
        self.bar.update(self.tasks[what], completed=done, total=total, visible=done < total)


def _images(subject: Subject) -> str:
    return f"{len(subject)} {subject.split} image{'s' * (len(subject) != 1)}"


def show_exams(exams: Sequence[Exam], console: Console) -> None:
    """The scalars of all exams side by side, what did not work out, and where the rest is."""
    rows = scalar_rows(exams)
    if rows and console.is_terminal:
        table = Table(box=None, header_style="bold")
        for number, name in enumerate(rows[0]):
            table.add_column(escape(name), justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(escape(value) for value in row.values()))
        console.print(table)
    elif rows and not console.quiet:
        for line in (list(rows[0]), *(list(row.values()) for row in rows)):
            print("\t".join(line), file=console.file)  # not by rich, which makes spaces of tabs
    for exam in exams:
        for probe, status, reason in _shortcomings(exam):
            console.print(
                f"[yellow]{probe} {_WORDS[status]}[/] ({escape(exam.name)}): {escape(reason)}",
                soft_wrap=True,
                highlight=False,
            )
    for exam in exams:
        stored = f" ({', '.join(sorted(exam.reused))} from before)" if exam.reused else ""
        console.print(f"in full: [bold]{escape(str(exam.folder))}[/]{stored}", soft_wrap=True, highlight=False)
        for probe, folder in exam.pictures.items():
            console.print(f"pictures of {probe}: [bold]{escape(str(folder))}[/]", soft_wrap=True, highlight=False)


def _shortcomings(exam: Exam) -> Iterator[tuple[str, str, str]]:
    """(probe, status, reason) of those without a full result; what does not apply for one reason is said at once."""
    alike: dict[str, list[str]] = {}
    for probe, measurement in exam.items():
        if measurement.status == "does_not_apply":
            alike.setdefault(str(measurement.reason), []).append(probe)
        elif measurement.status != "ok":
            yield probe, measurement.status, str(measurement.reason)
    for reason, probes in alike.items():
        yield ", ".join(probes), "does_not_apply" if len(probes) == 1 else "do_not_apply", reason


def scalar_rows(exams: Sequence[Exam]) -> list[dict[str, str]]:
    """One row for each scalar of each probe, one column for each exam."""
    names = [
        (probe, scalar)
        for probe in dict.fromkeys(probe for exam in exams for probe in exam)
        for scalar in dict.fromkeys(name for exam in exams for name in exam[probe].scalars)
    ]
    columns = [
        exam.name if [e.name for e in exams].count(exam.name) == 1 else f"{exam.name} {number}"
        for number, exam in enumerate(exams, 1)
    ]
    return [
        {
            "measured": f"{probe}.{scalar}",
            **{column: written(exam[probe].scalars.get(scalar)) for column, exam in zip(columns, exams, strict=True)},
        }
        for probe, scalar in names
    ]


def written(scalar: Scalar | None) -> str:
    """A count in full; any other scalar in four digits, with its interval.

    Example:
        >>> written(Scalar(value=1234567.0)), written(Scalar(value=0.51239, low=0.5, high=0.525))
        ('1,234,567', '0.5124 [0.5, 0.525]')
    """
    if scalar is None:
        return "-"
    if scalar.low is None and scalar.value.is_integer():
        return f"{scalar.value:,.0f}"
    interval = f" [{scalar.low:.4g}, {scalar.high:.4g}]" if scalar.low is not None and scalar.high is not None else ""
    return f"{scalar.value:.4g}{interval}"


def plain(exam: Exam) -> dict[str, Any]:
    """An exam as JSON data; arrays stay in their files."""
    return {
        "target": exam.name,
        "subject": exam.subject,
        "folder": str(exam.folder),
        "measurements": {probe: _plain(measurement, exam, probe) for probe, measurement in exam.items()},
    }


def _plain(measurement: Measurement, exam: Exam, probe: str) -> dict[str, Any]:
    record = {**measurement.plain(), "file": exam.files[probe].name, "reused": probe in exam.reused}
    return record | ({"pictures": exam.pictures[probe].name} if probe in exam.pictures else {})


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "an unknown time"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
