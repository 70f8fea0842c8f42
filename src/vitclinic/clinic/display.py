"""What a person sees of finished exams: one table for all networks, what it means, and where the rest is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitclinic.clinic.exam import Exam
from vitclinic.clinic.summary import MARK, all_rows, columns, key_rows
from vitclinic.finding import Finding
from vitclinic.measurement import Measurement

_WORDS = {
    "not_converged": ("has not converged", "have not converged"),
    "does_not_apply": ("does not apply", "do not apply"),
    "failed": ("failed", "failed"),
}
_STYLES = {"problem": "bold red", "notice": "bold yellow", "healthy": "bold green"}


def show_exams(exams: Sequence[Exam], console: Console, *, whole: bool = True) -> None:
    """The numbers of all exams side by side (key numbers, or all), what they mean, what did not work out."""
    rows = all_rows(exams) if whole else key_rows(exams)
    if rows and console.is_terminal:
        _show_table(rows, console)
    elif rows and not console.quiet:
        for row in rows:
            print("\t".join(row), file=console.file)  # not by rich, which makes spaces of tabs
    for name, exam in zip(columns(exams), exams, strict=True):
        for finding in exam.findings:
            _say(console, _in_words(finding, name))
        for probes, status, reason in _shortcomings(exam, whole):
            words = _WORDS[status][len(probes) > 1]
            _say(console, f"[yellow]{', '.join(probes)} {words}[/] ({escape(name)}): {escape(reason)}")
    if missing := list(dict.fromkeys(probe for exam in exams for probe in exam.left_out)):
        _say(
            console, f"[yellow]not measured for want of time[/]: {', '.join(missing)} (a longer --budget, or --probes)"
        )
    for exam in exams:
        stored = f" ({', '.join(sorted(exam.reused))} from before)" if exam.reused else ""
        _say(console, f"in full: [bold]{escape(str(exam.folder))}[/]{stored}")
        for probe, folder in exam.pictures.items():
            _say(console, f"pictures of {probe}: [bold]{escape(str(folder))}[/]")


def _show_table(rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0]):
        table.add_column(escape(name), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(f"[bold green]{escape(cell)}[/]" if cell.endswith(MARK) else escape(cell) for cell in row))
    console.print(table)
    if any(cell.endswith(MARK) for row in rows for cell in row):
        _say(console, f"[dim]{MARK.strip()} better than the others, beyond the intervals[/]")


def _in_words(finding: Finding, name: str) -> str:
    tried = "; ".join(f"{escape(each.treatment)} ({escape(each.paper)})" for each in finding.suggestions)
    return (
        f"[{_STYLES[finding.severity]}]{finding.severity}: {escape(finding.title)}[/] ({escape(name)}):"
        f" {escape(finding.statement)}" + (f" Try {tried}." if tried else "")
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _shortcomings(exam: Exam, whole: bool) -> Iterator[tuple[list[str], str, str]]:
    """(probes, status, reason) of those without a full result; what has one reason is said at once.

    Where nobody asked for them by name, probes that do not apply for a reason of their own are only listed.
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
        yield listed, "does_not_apply", "for reasons that the report gives."


def plain(exam: Exam) -> dict[str, Any]:
    """An exam as JSON data; arrays stay in their files."""
    return {
        "target": exam.name,
        "subject": exam.subject,
        "folder": str(exam.folder),
        "measurements": {probe: _plain(measurement, exam, probe) for probe, measurement in exam.items()},
        "findings": [finding.model_dump(mode="json") for finding in exam.findings],
        "left_out": exam.left_out,
    }


def _plain(measurement: Measurement, exam: Exam, probe: str) -> dict[str, Any]:
    record = {**measurement.plain(), "file": exam.files[probe].name, "reused": probe in exam.reused}
    return record | ({"pictures": exam.pictures[probe].name} if probe in exam.pictures else {})
