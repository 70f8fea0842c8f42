"""Figures of probes that nobody has written a drawer for: every value of its units over depth."""

from __future__ import annotations

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic.measurement import UnitRow
from vitclinic.reports.colours import DASHES, MARKERS, of_network
from vitclinic.reports.contents import Examined
from vitclinic.reports.escaping import plain
from vitclinic.reports.figure import Figure, Table, measured

READING = (
    "Each point is one unit of the network, from the input at the left to the head at the right, with its interval"
    " where there is one. The probe's own documentation says what the value means."
)


def drawn_generically(probe: str, examined: Sequence[Examined]) -> list[Figure]:
    """One line plot for each value that the probe's units have."""
    found = measured(examined, probe)
    values = dict.fromkeys(name for _, _, one in found for row in one.units for name in row.values)
    return [_over_depth(probe, value, number, examined) for number, value in enumerate(values, 1)]


def _over_depth(probe: str, value: str, number: int, examined: Sequence[Examined]) -> Figure:
    plot, rows = go.Figure(), []
    for place, name, measurement in measured(examined, probe):
        units = [row for row in measurement.units if value in row.values]
        if units:
            plot.add_trace(_line(place, name, value, units))
            rows += [_numbers(name, value, row) for row in units]
    plot.update_layout(xaxis_title="depth", yaxis_title=plain(value), height=380, showlegend=True)
    return Figure(
        name=re.sub(r"[^A-Za-z0-9]+", "-", f"{probe}-value-{number}").strip("-"),
        title=f"{value} by depth",
        reading=READING,
        paper="",
        table=Table(("network", "unit", "kind", "depth", value, "low", "high"), rows),
        plot=plot,
    )


def _line(place: int, name: str, value: str, units: Sequence[UnitRow]) -> go.Scatter:
    scalars = [row.values[value] for row in units]
    return go.Scatter(
        x=[row.depth for row in units],
        y=[scalar.value for scalar in scalars],
        error_y={
            "array": [None if scalar.high is None else scalar.high - scalar.value for scalar in scalars],
            "arrayminus": [None if scalar.low is None else scalar.value - scalar.low for scalar in scalars],
            "thickness": 1,
        },
        name=plain(name),
        text=[plain(row.name) for row in units],
        hovertemplate="%{text}: %{y:.4g}",
        mode="lines+markers",
        line={"color": of_network(place), "dash": DASHES[place % len(DASHES)]},
        marker={"symbol": MARKERS[place % len(MARKERS)], "size": 7},
    )


def _numbers(name: str, value: str, row: UnitRow) -> tuple[object, ...]:
    scalar = row.values[value]
    return (name, row.name, row.kind, row.depth, scalar.value, scalar.low, scalar.high)
