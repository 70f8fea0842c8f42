"""The learned scales of Context Broadcasting, layer by layer [hyeonwoo2023 Fig. 8]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import overlaid
from vitclinic.reports.figures.units import series, unit_table

_AXES = {"ratio": "ratio of quantiles", "mean": "mean scale"}


@draws("cb_scale")
def cb_scale(examined: Sequence[Examined]) -> list[Figure]:
    found = {axis: series(examined, "cb_scale", value) for value, axis in _AXES.items()}
    panels = {axis: networks for axis, networks in found.items() if networks}
    if not panels:
        return []
    return [
        Figure(
            name="cb-scale-layers",
            title="Learned scales of Context Broadcasting",
            reading="Above, the 10% quantile of a layer's scales over its 90% quantile, both without sign: near 1"
            " where all channels want the broadcast context alike; below, their mean. Hyeonwoo et al. found that both"
            " grow with depth, so that upper layers want dense interactions most.",
            paper="Hyeonwoo et al. 2023, Fig. 8 (H4)",
            table=unit_table(examined, "cb_scale", list(_AXES)),
            plot=overlaid(panels, "layer with learned scales", height=200),
        )
    ]
