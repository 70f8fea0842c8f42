"""Variance of feature maps over their positions, by depth [park2022 Fig. 9]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import shaded_lines
from vitclinic.reports.figures.drawing import is_wide
from vitclinic.reports.figures.units import series, unit_table


@draws("variance")
def variance(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "variance", "variance")
    if not found:
        return []
    values = [[scalar.value for scalar in one.scalars] for one in found]
    log = any(is_wide(numbers) for numbers in values) and all(number > 0 for numbers in values for number in numbers)
    return [
        Figure(
            name="variance-depth",
            title="Variance of feature maps by depth",
            reading="Each point is how much the feature maps after a unit vary over their positions; the shade between"
            " two points is the unit that leads from one to the other, and dotted lines part stages. Park and Kim"
            " found that MSAs lower it, as averaging does, and that MLPs and convs raise it; it has the scale of the"
            " features, so compare within a network.",
            paper="Park and Kim 2022, Fig. 9, D.1 (P7)",
            table=unit_table(examined, "variance", ["variance", "change"]),
            plot=shaded_lines(found, "variance", log=log),
        )
    ]
