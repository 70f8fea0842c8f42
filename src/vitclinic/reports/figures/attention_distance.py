"""How far attention reaches, layer by layer [hyeonwoo2023 Fig. 7b]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import overlaid
from vitclinic.reports.figures.heads import head_marks
from vitclinic.reports.figures.units import series, unit_table


@draws("attention_distance")
def attention_distance(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "attention_distance", "distance")
    if not found:
        return []
    plot = overlaid({"distance (sides of the grid)": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_distance"))
    plot.update_yaxes(rangemode="tozero")
    return [
        Figure(
            name="attention-distance-layers",
            title="Distance of attention by layer",
            reading="Each point is how far a query looks on average, rows and columns of the grid running from 0 to 1:"
            " 0 is every patch looking at itself, about 0.67 uniform attention; small dashes are heads. Divided by"
            " the number of other patches it is Hyeonwoo et al.'s relative distance (in the table), which Context"
            " Broadcasting should leave as it is.",
            paper="Hyeonwoo et al. 2023, Fig. 7b (H2)",
            table=unit_table(examined, "attention_distance", ["distance", "relative_distance"], heads="head_distance"),
            plot=plot,
        )
    ]
