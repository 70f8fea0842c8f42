"""Accuracy with the centre of the image hidden."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import beside, known, scalar_table

_GROUPS = {"clean_accuracy": "whole images", "accuracy": "centre hidden", "drop": "lost"}


@draws("occlusion")
def occlusion(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "occlusion")
    groups = known(found, _GROUPS)
    if not groups:
        return []
    return [
        Figure(
            name="occlusion",
            title="Accuracy with the centre hidden",
            reading="Bars are the accuracy on whole images, on the same images with their central quarter hidden, and"
            " the difference (paired), with 95% intervals. A network that uses the whole image loses little.",
            paper="Hyeon-Woo et al. 2023, Table 8 (H8)",
            table=scalar_table(found, groups),
            plot=beside(found, groups, "accuracy", share=True),
        )
    ]
