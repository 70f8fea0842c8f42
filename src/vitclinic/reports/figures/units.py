"""Values of units, read from measurements for figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic.reports.figure import ExamView, Table, select_usable
from vitclinic.reports.figures.canvas import Floats, finite, label
from vitclinic.reports.formatting import escape_plotly

KIND_NAMES = {
    "stem": "stem",
    "position": "position",
    "msa": "MSA",
    "mlp": "MLP",
    "conv": "conv",
    "token_mlp": "token MLP",
    "pool": "pooling",
    "head": "head",
}
"""The kinds of units as figures name them, in the order of legends."""

Anatomy = tuple[tuple[str, int, int], ...]
"""Kind, stage and depth of some units."""


@dataclass(frozen=True)
class Series:
    """One value of the units of one network that have it."""

    place: int
    name: str
    measurement: Measurement
    units: tuple[UnitRow, ...]
    value: str

    @property
    def label(self) -> str:
        """The network in a legend."""
        return label(self.name, self.measurement)

    @property
    def scalars(self) -> list[Scalar]:
        """The values, in the order of the units."""
        return [unit.values[self.value] for unit in self.units]

    @property
    def depths(self) -> Floats:
        """The depths of the units."""
        return np.array([unit.depth for unit in self.units], dtype=np.float64)

    @property
    def anatomy(self) -> Anatomy:
        """All units that were measured; networks of the same anatomy share an axis."""
        return tuple((unit.kind, unit.stage, unit.depth) for unit in self.measurement.units)


def collect_series(exams: Sequence[ExamView], probe: str, value: str) -> list[Series]:
    """Return a series for each network with a unit that has the value."""
    found = []
    for place, name, measurement in select_usable(exams, probe):
        units = tuple(unit for unit in measurement.units if value in unit.values)
        if units:
            found.append(Series(place, name, measurement, units, value))
    return found


def unit_names(units: Sequence[UnitRow]) -> list[str]:
    """Return units for hover boxes: name, kind and stage, escaped for plotly."""
    return [
        f"{escape_plotly(u.name)} ({escape_plotly(KIND_NAMES.get(u.kind, u.kind))}, stage {u.stage})" for u in units
    ]


def read_heads(measurement: Measurement, array: str) -> Floats | None:
    """Return an array of heads, [layers, heads], NaN where a layer has fewer; None if the measurement has none."""
    values = measurement.arrays.get(array)
    if values is None or values.ndim != 2 or len(values) != len(measurement.units):
        return None
    return finite(values)


def unit_table(exams: Sequence[ExamView], probe: str, values: Sequence[str], heads: str = "") -> Table:
    """Return values of all units that have one, with intervals, and those of heads from the array `heads`."""
    found = [one for _, name, measurement in select_usable(exams, probe) for one in _rows(name, measurement, heads)]
    found = [(name, unit, of_heads) for name, unit, of_heads in found if any(value in unit.values for value in values)]
    units = [unit for _, unit, _ in found]
    parts = [part for value in values for part in _parts(value, [u.values[value] for u in units if value in u.values])]
    most = max((len(of_heads) for _, _, of_heads in found), default=0)
    columns = ["network", "unit", "kind", "stage", "depth", *(title for title, _, _ in parts)]
    columns += [f"{heads.removeprefix('head_')} of head {number}" for number in range(most)]
    rows = [
        [name, unit.name, unit.kind, unit.stage, unit.depth]
        + [getattr(unit.values.get(value), part, None) for _, value, part in parts]
        + [*of_heads, *[None] * (most - len(of_heads))]
        for name, unit, of_heads in found
    ]
    return Table(tuple(columns), rows)


def _rows(name: str, measurement: Measurement, heads: str) -> Iterator[tuple[str, UnitRow, list[Any]]]:
    of_heads = read_heads(measurement, heads)
    for number, unit in enumerate(measurement.units):
        known = [] if of_heads is None else [None if np.isnan(one) else float(one) for one in of_heads[number]]
        yield name, unit, known


def _parts(value: str, scalars: Sequence[Scalar]) -> list[tuple[str, str, str]]:
    """Return the columns of a value as (title, value, field), with the ends of its interval if it ever has one."""
    if not scalars:
        return []
    uncertain = any(scalar.low is not None or scalar.high is not None for scalar in scalars)
    ends = [(f"{value} {end}", value, end) for end in ("low", "high")] if uncertain else []
    return [(value, value, "value"), *ends]
