"""Predictions between training images that are neither image's class."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import beside, known, scalar_table

_GROUPS = {
    "missing_rate": "all pairs",
    "missing_rate_different_classes": "two classes",
    "missing_rate_same_class": "one class",
}


@draws("missing_rate")
def missing_rate(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "missing_rate")
    groups = known(found, _GROUPS)
    if not groups:
        return []
    return [
        Figure(
            name="missing-rate",
            title="Misses halfway between training images",
            reading="A bar is the share of pairs of training images whose average is taken for a class that neither of"
            " them has, with its 95% interval. Shorter is more linear between the images; with few classes, look at the"
            " pairs of two classes.",
            paper="Chen et al. 2022, Table 6 (C6)",
            table=scalar_table(found, groups),
            plot=beside(found, groups, "share of pairs missed", share=True),
        )
    ]
