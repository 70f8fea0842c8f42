"""How alike the patches of an image become with depth [gong2021 Fig. 1b; wang2022 Fig. 1]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import overlaid
from vitclinic.reports.figures.units import series, unit_table

_AXES = {"absolute_cosine": "absolute cosine", "cosine": "cosine"}


@draws("token_similarity")
def token_similarity(examined: Sequence[Examined]) -> list[Figure]:
    found = {axis: series(examined, "token_similarity", value) for value, axis in _AXES.items()}
    panels = {axis: networks for axis, networks in found.items() if networks}
    if not panels:
        return []
    return [
        Figure(
            name="token-similarity-depth",
            title="Similarity of patches by depth",
            reading="Each point is the mean cosine between two patches of an image after a unit, stem and position"
            " embedding included: 1 if all point the same way, 0 if they are orthogonal. A line that climbs to the"
            " end is over-smoothing, which Gong et al. saw in deep ViTs and not in a ResNet; Wang et al. look at its"
            " beginning, where a convolutional stem should lower it.",
            paper="Gong et al. 2021, Fig. 1b, 3 (G1); Wang et al. 2022, Fig. 1 (W3)",
            table=unit_table(examined, "token_similarity", list(_AXES)),
            plot=overlaid(panels, "unit"),
        )
    ]
