"""Variance of feature maps over their positions, by depth [park2022 Fig. 9]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.figure import Examined, Figure, draws
from vitclinic.reports.figures.depth import overlaid, shaded_bars, shaded_lines
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


_CB_SCALE_AXES = {"ratio": "ratio of quantiles", "mean": "mean scale"}


@draws("cb_scale")
def cb_scale(examined: Sequence[Examined]) -> list[Figure]:
    found = {axis: series(examined, "cb_scale", value) for value, axis in _CB_SCALE_AXES.items()}
    panels = {axis: networks for axis, networks in found.items() if networks}
    if not panels:
        return []
    return [
        Figure(
            name="cb-scale-layers",
            title="Learned scales of Context Broadcasting",
            reading="Above, the 10% quantile of a layer's scales over its 90% quantile, both without sign: near 1"
            " where all channels want the broadcast context alike; below, their mean. Hyeon-Woo et al. found that both"
            " grow with depth, so that upper layers want dense interactions most.",
            paper="Hyeon-Woo et al. 2023, Fig. 8 (H4)",
            table=unit_table(examined, "cb_scale", list(_CB_SCALE_AXES)),
            plot=overlaid(panels, "layer with learned scales", height=200),
        )
    ]
