"""Exams: the measurements of networks, with findings, figures, tables and a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from vitclinic._core.errors import RecipeError, VitclinicError, did_you_mean
from vitclinic._core.io import write_errors
from vitclinic._core.records import Finding, Measurement, Scalar
from vitclinic.exam.commands import Origin
from vitclinic.exam.reporting import CURVES, view_exam
from vitclinic.reports.figure import ExamView
from vitclinic.reports.summary import summarize
from vitclinic.training import Run
from vitclinic.training.rows import read_curves, write_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from vitclinic.probes import Subject

MARK = " *"
"""Behind the value that is better than the others beyond their intervals."""
COLOURS = {"problem": "#d55e00", "notice": "#e69f00", "healthy": "#009e73"}


def column_names(networks: Sequence[Exam] | Sequence[Subject]) -> list[str]:
    """Return the names of networks, numbered where several have the same."""
    names = [network.name for network in networks]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names, 1)]


def key_rows(exams: Sequence[Exam]) -> list[list[str]]:
    """Return a table: a header, then the key numbers of each probe."""
    rows = summarize([exam.view for exam in exams])
    cells = [
        [f"{row.probe}.{row.scalar}", *(format_scalar(cell.scalar) + MARK * cell.best for cell in row.cells)]
        for row in rows
    ]
    return [["measured", *column_names(exams)], *cells] if cells else []


def all_rows(exams: Sequence[Exam]) -> list[list[str]]:
    """Return a table: a header, then all scalars of each probe."""
    names = [
        (probe, scalar)
        for probe in dict.fromkeys(probe for exam in exams for probe in exam)
        for scalar in dict.fromkeys(name for exam in exams if probe in exam for name in exam[probe].scalars)
    ]
    rows = [
        [
            f"{probe}.{scalar}",
            *(format_scalar(exam[probe].scalars.get(scalar) if probe in exam else None) for exam in exams),
        ]
        for probe, scalar in names
    ]
    return [["measured", *column_names(exams)], *rows] if rows else []


def format_scalar(scalar: Scalar | None) -> str:
    """Write a count in full, and any other scalar in four digits with its interval.

    Example:
        >>> format_scalar(Scalar(value=1234567.0)), format_scalar(Scalar(value=0.51239, low=0.5, high=0.525))
        ('1,234,567', '0.5124 [0.5, 0.525]')
    """
    if scalar is None:
        return "-"
    if scalar.low is None and scalar.value.is_integer():
        return f"{scalar.value:,.0f}"
    interval = f" [{scalar.low:.4g}, {scalar.high:.4g}]" if scalar.low is not None and scalar.high is not None else ""
    return f"{scalar.value:.4g}{interval}"


def render_html(exams: Sequence[Exam]) -> str:
    """Return findings and key numbers as HTML for a notebook, with all names escaped."""
    found = "".join(
        f"<p><b>{escape(name)}</b></p><ul>"
        + "".join(
            f'<li><b style="color:{COLOURS[finding.severity]}">{escape(finding.title)}</b>:'
            f" {escape(finding.statement)}{_code(finding)}</li>"
            for finding in exam.findings
        )
        + "".join(
            f"<li>{escape(probe)} failed: {escape(str(measurement.reason))}</li>"
            for probe, measurement in exam.items()
            if measurement.status == "failed"
        )
        + "</ul>"
        for name, exam in zip(column_names(exams), exams, strict=True)
    )
    rows = key_rows(exams)
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    )
    return f'<div class="vitclinic">{found}<table>{table}</table></div>'


def _code(finding: Finding) -> str:
    """Return the commands of a finding, each on a line of its own."""
    commands = [one.command for one in finding.suggestions] + [finding.again]
    return "".join(f"<br><code>{escape(command)}</code>" for command in commands if command)


@dataclass(frozen=True)
class Exam(Mapping[str, Measurement]):
    """The measurements of one subject, by probe: `exam["norms"].scalars["weight_norm"].value`."""

    name: str
    subject: str
    """Digest of the network."""
    folder: Path
    """Where the measurements are stored."""
    measurements: dict[str, Measurement]
    files: dict[str, Path] = field(default_factory=dict)
    reused: frozenset[str] = frozenset()
    """The probes whose measurements had been made before."""
    pictures: dict[str, Path] = field(default_factory=dict)
    """The folders with pictures, of the probes that draw some."""
    run: Run | None = None
    """The run that the network comes from, if it is from one."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak of what was measured now, as estimated beforehand: of a pass, for all probes that share it."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why some probes were not measured, of those that could have been."""
    reference: Exam | None = None
    """The exam that findings compare this one with."""
    origin: Origin | None = None
    """Target and data as the user named them."""

    def __getitem__(self, probe: str) -> Measurement:
        if probe in self.measurements:
            return self.measurements[probe]
        if probe in self.left_out:
            raise KeyError(f"'{probe}' was not measured: {self.left_out[probe]}")
        raise KeyError(f"'{probe}' was not measured.{did_you_mean(probe, self.measurements)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def __repr__(self) -> str:
        found = ", ".join(f"{name}: {measurement.status}" for name, measurement in self.measurements.items())
        return f"Exam({self.name}; {found})"

    def _repr_html_(self) -> str:
        return Exams([self])._repr_html_()

    @cached_property
    def view(self) -> ExamView:
        """As a report takes it."""
        compared = None if self.reference is None else self.reference.measurements
        found = view_exam(self.name, self.measurements, self.run, compared, self.folder, self.origin)
        return replace(found, left_out=self.left_out)

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings about the network, problems first, compared with the first of several that were examined."""
        return self.view.findings

    def figure(self, probe: str, name: str | None = None) -> go.Figure:
        """Return the figure of one probe; if there are several, the first or the one of that name."""
        return Exams([self]).figure(probe, name)

    def add_curves(self, source: str | Path) -> None:
        """Take in the curves of a network that another library trained; its report and findings then have them.

        They are kept in the exam's folder, where later reports find them.

        Args:
            source: A CSV file (timm's summary.csv, Lightning's metrics.csv, any with a column `step` or `epoch`), a
                TensorBoard event file, or a folder with such files.

        Raises:
            RecipeError: The network is of a run, which has its own curves.
            DataError: The curves cannot be read.
        """
        if self.run is not None:
            raise RecipeError(f"'{self.name}' is a run, which has its own curves.")
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_rows(self.folder / CURVES, read_curves(source))
        self.__dict__.pop("view", None)

    def report(self, path: str | Path, *, images: bool = True) -> Path:
        """Write a page about this network; `images=False` leaves pictures of the data out."""
        return Exams([self]).report(path, images=images)


class Exams(list[Exam]):
    """The exams of several networks, which are compared with the first of them."""

    failures: dict[str, VitclinicError]
    """Why some targets could not be examined, by their names."""

    def __init__(self, exams: Iterable[Exam] = ()) -> None:
        super().__init__(exams)
        self.failures = {}

    @classmethod
    def of(cls, exams: Iterable[Exam]) -> Exams:
        """Make exams of which the first is the reference of the others."""
        found = list(exams)
        return cls([*found[:1], *(replace(exam, reference=found[0]) for exam in found[1:])])

    def report(self, path: str | Path, *, images: bool = True) -> Path:
        """Write a page with all networks side by side; `images=False` leaves pictures of the data out."""
        from vitclinic.reports.page import write_report  # plotly and a template: not before there is a page to write

        return write_report(path, [exam.view for exam in self], images=images)

    def figure(self, probe: str, name: str | None = None) -> go.Figure:
        """Return the figure of one probe for all networks; if there are several, the first or the one of that name."""
        from vitclinic.reports.figures import draw_figure  # with plotly, which takes a while

        return draw_figure([ExamView(exam.name, exam.measurements) for exam in self], probe, name)

    def _repr_html_(self) -> str:
        return render_html(self)
