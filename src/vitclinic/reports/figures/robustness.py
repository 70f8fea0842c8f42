"""Accuracy under FGSM and PGD."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import Examined, Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured, beside, known, scalar_table
from vitclinic.reports.figures.drawing import (
    GREY,
    band,
    canvas,
    ends,
    error_bars,
    finite,
    label,
    line,
    marker_style,
    number,
    of_one,
)
from vitclinic.reports.formatting import plain
from vitclinic.reports.theme import of_network


@draws("fgsm")
def fgsm(examined: Sequence[Examined]) -> list[Figure]:
    return _attacked(examined, "fgsm", "one step along the gradient", "Hyeon-Woo et al. 2023, Table 8 (H8)")


@draws("pgd")
def pgd(examined: Sequence[Examined]) -> list[Figure]:
    return _attacked(examined, "pgd", "small steps along the gradient", "Chen et al. 2022, Table 7 (C10)")


def _attacked(examined: Sequence[Examined], probe: str, how: str, paper: str) -> list[Figure]:
    found = measured(examined, probe)
    groups = known(
        found,
        {
            "clean_accuracy": "clean",
            "noise_accuracy": "random noise",
            "robust_accuracy": probe.upper(),
            "success": "fooled",
        },
    )
    if not groups:
        return []
    sizes = list(dict.fromkeys(_size(one) for _, _, one in found))
    named = [(place, f"{name}, {_size(one)}" if len(sizes) > 1 else name, one) for place, name, one in found]
    return [
        Figure(
            name=probe,
            title=f"Accuracy under {probe.upper()} ({', '.join(sizes)})",
            reading=f"Bars are the accuracy on the images as they are, with random noise, and after {how}, each change"
            " of a pixel being as large as the bound allows; 'fooled' is the share of the recognised images that the"
            " attack turns. A robust accuracy is an upper bound: if noise does as much as the attack, the gradient is"
            " masked, and the robustness is none.",
            paper=paper,
            table=scalar_table(found, {**groups, "drop": "", "zero_gradient_share": "", "epsilon": ""}),
            plot=beside(named, groups, "share of images", share=True),
        )
    ]


def _size(measurement: Measurement) -> str:
    """How far the attack may go: `2/255 in l_inf`."""
    epsilon = measurement.scalars.get("epsilon")
    norm = str(measurement.config.get("norm", "linf"))
    if epsilon is None:
        return norm
    pixels = epsilon.value * 255
    in_words = f"{pixels:.3g}/255" if norm == "linf" else f"{epsilon.value:.3g}"
    return f"{in_words} in {norm.replace('linf', 'l∞').replace('l2', 'l₂')}"


_ARRAYS = ("frequency", "frequencies", "accuracy", "drop", "drop_interval")


@draws("frequency_noise")
def frequency_noise(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "frequency_noise") if all(name in each[2].arrays for name in _ARRAYS)]
    if not found:
        return []
    rows = []
    for _, name, one in found:
        columns = (one.arrays[array] for array in ("frequency", "frequencies", "accuracy", "drop"))
        low, high = one.arrays["drop_interval"].T
        rows += [(name, *row) for row in zip(*(c.tolist() for c in (*columns, low, high)), strict=True)]
    return [
        Figure(
            name="frequency-noise",
            title="Accuracy lost to noise, by its frequency",
            reading="Each point is what the accuracy loses when noise of one ring of frequencies, always of the same"
            " strength, is added to the images; bands are 95% intervals. A network that is high on the right lives on"
            " fine detail, as CNNs do; one that is high on the left on coarse form, as ViTs do, says the paper.",
            paper="Park and Kim 2022, Fig. 2b (P8)",
            table=Table(
                ("network", "frequency_in_pi", "frequencies", "accuracy", "drop", "drop_low", "drop_high"), rows
            ),
            plot=_plot(found),
        )
    ]


def _plot(found: Measured) -> go.Figure:
    figure = canvas(340, legend=len(found))
    for place, name, one in found:
        frequency, drop = one.arrays["frequency"], one.arrays["drop"]
        low, high = one.arrays["drop_interval"].T
        figure.add_trace(band(place, frequency, low, high))
        figure.add_trace(
            line(place, label(name, one), frequency, drop, connectgaps=True, hovertemplate="%{x:.2f}π: %{y:.1%}")
        )
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title_text="frequency of the noise", ticksuffix="π", rangemode="tozero")
    figure.update_yaxes(title_text="accuracy lost", tickformat=".0%")
    return figure


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


_OCCLUSION_GROUPS = {"clean_accuracy": "whole images", "accuracy": "centre hidden", "drop": "lost"}


@draws("occlusion")
def occlusion(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "occlusion")
    groups = known(found, _OCCLUSION_GROUPS)
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


_PREFIX = "shape_bias_"


@draws("shape_bias")
def shape_bias(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "shape_bias")
    classes = {key: key.removeprefix(_PREFIX) for _, _, one in found for key in one.scalars if key.startswith(_PREFIX)}
    if not classes:
        return []
    everything = {"shape_bias": "", "shape_decisions": "", "texture_decisions": "", **classes}
    return [
        Figure(
            name="shape-bias",
            title="Shape or texture",
            reading="Images have the shape of one class and the texture of another; a point is, of the decisions for"
            " either, the share for the shape, by the class of the shape, with its 95% interval. The vertical line is"
            " the network's share over all classes: right of the middle it goes by shape, left by texture.",
            paper="Geirhos et al. 2019, Fig. 4; Park and Kim 2022, Sec. 3",
            table=scalar_table(found, everything),
            plot=_shape_bias_plot(found, classes),
        )
    ]


def _shape_bias_plot(found: Measured, classes: dict[str, str]) -> go.Figure:
    figure = canvas(70 + len(classes) * (14 + 9 * len(found)), legend=2 * len(found))
    for place, name, one in found:
        values, low, high = ends([one.scalars.get(key) for key in classes])
        overall = one.scalars.get("shape_bias")
        figure.add_trace(
            go.Scatter(
                x=finite(values),
                y=[plain(title) for title in classes.values()],
                orientation="h",
                offsetgroup=str(place),
                mode="markers",
                marker=marker_style(place, 8),
                error_x=error_bars(values, low, high, place),
                hovertemplate="%{y}: %{x:.1%}",
                **of_one(place, label(name, one, number(overall, ".0%"))),
            )
        )
        if overall is not None:
            figure.add_vline(x=overall.value, line={"color": of_network(place), "width": 1.5})
    figure.add_vline(x=0.5, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="decisions for the shape", range=[-0.02, 1.02])
    figure.update_xaxes(tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(scattermode="group")
    return figure


_SHIFT_GROUPS = {"accuracy": "among all outputs", "accuracy_among_mapped": "among the set's"}


@draws("shift")
def shift(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "shift")
    groups = known(found, _SHIFT_GROUPS)
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
