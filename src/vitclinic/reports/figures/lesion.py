"""What a network loses without each of its units [park2022 Fig. 10b]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import shaded_bars
from vitclinic.reports.figures.units import series, unit_table


@draws("lesion")
def lesion(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "lesion", "accuracy_drop")
    if not found:
        return []
    return [
        Figure(
            name="lesion-drop",
            title="Accuracy lost without each unit",
            reading="Each bar is the accuracy that the trained network loses when one unit is removed, with its 95%"
            " interval: a whisker that reaches zero is a unit that was not missed on these images. Park and Kim found"
            " that convs and MLPs at the beginning of a stage and MSAs at its end matter most, so that the bars"
            " repeat with the stages, which dotted lines part.",
            paper="Park and Kim 2022, Fig. 10b, D.4 (P10)",
            table=unit_table(examined, "lesion", ["accuracy_drop", "accuracy", "nll_rise"]),
            plot=shaded_bars(found, "accuracy lost", share=True),
        )
    ]
