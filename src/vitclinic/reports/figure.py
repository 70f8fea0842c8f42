"""Records that a report is made of: exams, and the figures, tables and pictures that show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitclinic._core.records import Finding, Measurement

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class ExamView:
    """One network as a report shows it: its name, measurements, findings and training."""

    name: str
    """As the user wrote it; anything may stand here, and is escaped where it is shown."""
    measurements: Mapping[str, Measurement]
    """By probe."""
    findings: Sequence[Finding] = ()
    training: Sequence[Mapping[str, Any]] = ()
    """The rows of a run's metrics.jsonl: kind, step, epoch, loss, ..."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else is known, in its order, for the head of the page: data, recipe, treatments, parameters."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why some probes were not measured that could have been, by probe."""


@dataclass(frozen=True)
class Picture:
    """An image of the user's, or a drawing over one; a page without images leaves it out."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Table:
    """A figure's numbers, as they go into its CSV."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Figure:
    """A plot or some pictures, with what a reader needs to understand them."""

    name: str
    """Of letters, digits and hyphens, unique on the page: `fourier-depth`."""
    title: str
    reading: str
    """Two sentences on how to read it."""
    paper: str
    """Where it comes from: "Park and Kim 2022, Fig. 2a (P6)"; empty if from none of the papers."""
    table: Table
    plot: go.Figure | None = None
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    """What a reader should know beside it, a sentence each."""
    heavy: bool = False
    """Drawn only when its section is opened, as are surfaces in three dimensions."""


Drawer = Callable[[Sequence[ExamView]], list[Figure]]
DRAWERS: dict[str, Drawer] = {}
"""By probe; `training` draws a run's metrics."""


def draws(probe: str) -> Callable[[Drawer], Drawer]:
    """Make a function draw the measurements of `probe`; use it as a decorator.

    Args:
        probe: The probe's name.

    Returns:
        The decorator. Its function takes the exams of the report and returns figures, none where there is nothing to
        draw.
    """

    def register(drawer: Drawer) -> Drawer:
        DRAWERS[probe] = drawer
        return drawer

    return register


def select_usable(exams: Sequence[ExamView], probe: str) -> list[tuple[int, str, Measurement]]:
    """Return the usable measurements of a probe: those that applied and did not fail.

    Args:
        exams: The networks of a report.
        probe: The probe's name.

    Returns:
        (place, name, measurement) of each network that has one; the place in the report decides the network's colour.
    """
    found = ((place, one.name, one.measurements.get(probe)) for place, one in enumerate(exams))
    return [
        (place, name, measurement)
        for place, name, measurement in found
        if measurement is not None and measurement.status in ("ok", "not_converged")
    ]
