"""Accuracy lost to noise of one band of frequencies after the other."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured
from vitclinic.reports.figures.drawing import GREY, band, canvas, label, line

_ARRAYS = ("frequency", "frequencies", "accuracy", "drop", "drop_interval")


@draws("frequency_noise")
def frequency_noise(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "frequency_noise") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        columns = (one.arrays[array] for array in ("frequency", "frequencies", "accuracy", "drop"))
        low, high = one.arrays["drop_interval"].T
        rows += [(name, *row) for row in zip(*(c.tolist() for c in (*columns, low, high)), strict=True)]
    return [
        Figure(
            name="frequency-noise",
            title="Accuracy lost to noise, by its frequency",
            reading="Each point is what the accuracy loses when noise of one ring of frequencies, always of the same"
            " strength, is added to the images; bands are 95% intervals. A network that is high on the right lives on"
            " fine detail, as CNNs do; one that is high on the left on coarse form, as ViTs do, says the paper.",
            paper="Park and Kim 2022, Fig. 2b (P8)",
            table=Table(
                ("network", "frequency_in_pi", "frequencies", "accuracy", "drop", "drop_low", "drop_high"), rows
            ),
            plot=_plot(found),
        )
    ]


def _plot(found: Measured) -> go.Figure:
    figure = canvas(340, legend=len(found))
    for place, name, one in found:
        frequency, drop = one.arrays["frequency"], one.arrays["drop"]
        low, high = one.arrays["drop_interval"].T
        figure.add_trace(band(place, frequency, low, high))
        figure.add_trace(
            line(place, label(name, one), frequency, drop, connectgaps=True, hovertemplate="%{x:.2f}π: %{y:.1%}")
        )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="frequency of the noise", ticksuffix="π", rangemode="tozero")
    figure.update_yaxes(title_text="accuracy lost", tickformat=".0%")
    return figure
