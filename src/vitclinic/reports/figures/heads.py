"""The heads of attention layers, as dashes around the mean of their layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from vitclinic.measurement import UnitRow
from vitclinic.reports.colours import of_network
from vitclinic.reports.figures.depth import places, same_units
from vitclinic.reports.figures.drawing import Floats, of_one
from vitclinic.reports.figures.units import Series, by_head, unit_names


def head_marks(found: Sequence[Series], array: str, divisor: str | None = None) -> list[go.Scatter]:
    """A dash for each head of each layer of the series, divided by the layer's number `divisor` if there is one."""
    shared = same_units(found)
    return [trace for one in found for trace in _marks(one, places(one, shared), array, divisor)]


def _marks(one: Series, x: Floats, array: str, divisor: str | None) -> list[go.Scatter]:
    values = by_head(one.measurement, array)
    if values is None:
        return []
    rows = dict(zip((unit.depth for unit in one.measurement.units), values, strict=True))
    heads = np.stack([rows[unit.depth] / _divisor(unit, divisor) for unit in one.units])
    layers, numbers = np.nonzero(np.isfinite(heads))
    names = unit_names(one.units)
    return [
        go.Scatter(
            x=x[layers],
            y=heads[layers, numbers],
            mode="markers",
            marker={"size": 10, "symbol": "line-ew-open", "color": of_network(one.place), "line": {"width": 1.2}},
            opacity=0.55,
            customdata=[(names[layer], int(head)) for layer, head in zip(layers, numbers, strict=True)],
            hovertemplate="%{customdata[0]}<br>head %{customdata[1]}: %{y:.4g}",
            **of_one(one.place, one.label, shown=False),
        )
    ]


def _divisor(unit: UnitRow, name: str | None) -> float:
    if name is None:
        return 1.0
    return unit.values[name].value if name in unit.values else math.nan
