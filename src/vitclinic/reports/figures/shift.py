"""Accuracy on data of other classes."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import beside, known, scalar_table

_GROUPS = {"accuracy": "among all outputs", "accuracy_among_mapped": "among the set's"}


@draws("shift")
def shift(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "shift")
    groups = known(found, _GROUPS)
    if not groups:
        return []
    return [
        Figure(
            name="shift",
            title="Accuracy on another set of images",
            reading="Bars are the share of the other set's images that are recognised, the best of all outputs"
            " deciding, or the best of those that stand for some class of the set, with 95% intervals. The first is the"
            " custom for ReaL, the second for ImageNet-R and -A; where the set has all classes they are the same.",
            paper="Chen et al. 2022, Table 2 (C2)",
            table=scalar_table(found, {**groups, "images_left_out": ""}),
            plot=beside(found, groups, "accuracy", share=True),
        )
    ]
