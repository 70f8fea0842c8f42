"""The share of active neurons by depth [chen2022 Fig. 2]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import overlaid
from vitclinic.reports.figures.units import series, unit_table


@draws("sparsity")
def sparsity(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "sparsity", "active")
    if not found:
        return []
    plot = overlaid({"active neurons": found}, "unit with an activation function", share=True)
    plot.update_yaxes(rangemode="tozero")
    return [
        Figure(
            name="sparsity-depth",
            title="Active neurons by depth",
            reading="Each point is the share of hidden values behind a unit's activation function that are greater"
            " than zero, averaged over images. Chen et al. found below 10% in most layers of a ViT, far more in"
            " ResNet and Mixer, and fewer in the first layers after training with SAM.",
            paper="Chen et al. 2022, Fig. 2 right (C5, C15)",
            table=unit_table(examined, "sparsity", ["active"]),
            plot=plot,
        )
    ]
