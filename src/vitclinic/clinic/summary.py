"""Exams as a table with a column for each network, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from vitclinic.measurement import Scalar
from vitclinic.reports.summary import summary

if TYPE_CHECKING:
    from vitclinic.clinic.exam import Exam

MARK = " *"
"""Behind the value that is better than the others beyond their intervals."""
COLOURS = {"problem": "#d55e00", "notice": "#e69f00", "healthy": "#009e73"}


def columns(exams: Sequence[Exam]) -> list[str]:
    """The networks' names, with numbers where they are the same."""
    names = [exam.name for exam in exams]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names, 1)]


def key_rows(exams: Sequence[Exam]) -> list[list[str]]:
    """The header, then the key numbers of each probe."""
    rows = summary([exam.examined for exam in exams])
    cells = [
        [f"{row.probe}.{row.scalar}", *(written(cell.scalar) + MARK * cell.best for cell in row.cells)] for row in rows
    ]
    return [["measured", *columns(exams)], *cells] if cells else []


def all_rows(exams: Sequence[Exam]) -> list[list[str]]:
    """The header, then all scalars of each probe."""
    names = [
        (probe, scalar)
        for probe in dict.fromkeys(probe for exam in exams for probe in exam)
        for scalar in dict.fromkeys(name for exam in exams if probe in exam for name in exam[probe].scalars)
    ]
    rows = [
        [
            f"{probe}.{scalar}",
            *(written(exam[probe].scalars.get(scalar) if probe in exam else None) for exam in exams),
        ]
        for probe, scalar in names
    ]
    return [["measured", *columns(exams)], *rows] if rows else []


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


def as_html(exams: Sequence[Exam]) -> str:
    """The findings of each network and the key numbers, for a notebook; whatever users named is escaped."""
    found = "".join(
        f"<p><b>{escape(name)}</b></p><ul>"
        + "".join(
            f'<li><b style="color:{COLOURS[finding.severity]}">{escape(finding.title)}</b>:'
            f" {escape(finding.statement)}</li>"
            for finding in exam.findings
        )
        + "".join(
            f"<li>{escape(probe)} failed: {escape(str(measurement.reason))}</li>"
            for probe, measurement in exam.items()
            if measurement.status == "failed"
        )
        + "</ul>"
        for name, exam in zip(columns(exams), exams, strict=True)
    )
    rows = key_rows(exams)
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    )
    return f'<div class="vitclinic">{found}<table>{table}</table></div>'
