"""Attacks (FGSM and PGD), noise by frequency, shape against texture, and corruptions at each severity."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import (
    SEQUENTIAL,
    ExamView,
    Figure,
    Picture,
    Table,
    draws,
    escape_plotly,
    network_colour,
    select_usable,
)
from vitclinic.reports.figures.canvas import (
    COLOUR_BAR_HEIGHT,
    GREY,
    PANEL_LONGEST,
    Measurements,
    band,
    compare_scalars,
    ends,
    error_bars,
    finite,
    format_scalar,
    label,
    line,
    make_canvas,
    marker_style,
    put_colours_below,
    scalar_table,
    select_known,
    trace_group,
)


@draws("fgsm")
def fgsm(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw accuracy under a one-step attack."""
    return _draw_attack(exams, "fgsm", "one step along the gradient", "Hyeon-Woo et al. 2023, Table 8 (H8)")


@draws("pgd")
def pgd(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw accuracy under an attack of several steps."""
    return _draw_attack(exams, "pgd", "small steps along the gradient", "Chen et al. 2022, Table 7 (C10)")


def _draw_attack(exams: Sequence[ExamView], probe: str, how: str, paper: str) -> list[Figure]:
    found = select_usable(exams, probe)
    groups = select_known(
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
            plot=compare_scalars(named, groups, "share of images", share=True),
        )
    ]


def _size(measurement: Measurement) -> str:
    """Return how far the attack may go: `2/255 in l_inf`."""
    epsilon = measurement.scalars.get("epsilon")
    norm = str(measurement.config.get("norm", "linf"))
    if epsilon is None:
        return norm
    pixels = epsilon.value * 255
    in_words = f"{pixels:.3g}/255" if norm == "linf" else f"{epsilon.value:.3g}"
    return f"{in_words} in {norm.replace('linf', 'l∞').replace('l2', 'l₂')}"


_ARRAYS = ("frequency", "frequencies", "accuracy", "drop", "drop_interval")


@draws("frequency_noise")
def frequency_noise(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the accuracy lost to noise, by its frequency."""
    found = [
        each for each in select_usable(exams, "frequency_noise") if all(name in each[2].arrays for name in _ARRAYS)
    ]
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


def _plot(found: Measurements) -> go.Figure:
    figure = make_canvas(340, legend=len(found))
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


_BIAS = "shape_bias_"


@draws("shape_bias")
def shape_bias(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the share of decisions by shape, by class."""
    found = select_usable(exams, "shape_bias")
    classes = {key: key.removeprefix(_BIAS) for _, _, one in found for key in one.scalars if key.startswith(_BIAS)}
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


def _shape_bias_plot(found: Measurements, classes: dict[str, str]) -> go.Figure:
    figure = make_canvas(70 + len(classes) * (14 + 9 * len(found)), legend=2 * len(found))
    for place, name, one in found:
        values, low, high = ends([one.scalars.get(key) for key in classes])
        overall = one.scalars.get("shape_bias")
        figure.add_trace(
            go.Scatter(
                x=finite(values),
                y=[escape_plotly(title) for title in classes.values()],
                orientation="h",
                offsetgroup=str(place),
                mode="markers",
                marker=marker_style(place, 8),
                error_x=error_bars(values, low, high, place),
                hovertemplate="%{y}: %{x:.1%}",
                **trace_group(place, label(name, one, format_scalar(overall, ".0%"))),
            )
        )
        if overall is not None:
            figure.add_vline(x=overall.value, line={"color": network_colour(place), "width": 1.5})
    figure.add_vline(x=0.5, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="decisions for the shape", range=[-0.02, 1.02])
    figure.update_xaxes(tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(scattermode="group")
    return figure


_ACCURACY = "accuracy_"
_PAPER = "Park and Kim 2022, Fig. 12b (P11); Hendrycks and Dietterich 2019"


@draws("corruptions")
def corruptions(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw accuracy by corruption and severity, and its mean by severity."""
    found = [each for each in select_usable(exams, "corruptions") if _is_whole(each[2])]
    if not found:
        return []
    table = _table(found)
    heat = Figure(
        name="corruptions",
        title="Accuracy by corruption and severity",
        reading="Each cell is the accuracy in percent under one corruption at one severity, from 1 (mild) to 5, all"
        " panels on one scale of colours. Compare cells across networks, which saw the same corrupted images; the"
        " pictures show the first of these at severity 3.",
        paper=_PAPER,
        table=table,
        plot=_heat(found),
        pictures=_samples(found[0][2]),
    )
    slope = Figure(
        name="corruptions-severity",
        title="Accuracy by severity",
        reading="The mean accuracy over all corruptions of one severity, severity 0 being the images as they are. A"
        " network whose curve falls less is more robust; where it starts is its clean accuracy.",
        paper=_PAPER,
        table=table,
        plot=_slope(found),
    )
    return [heat, slope]


def _names(measurement: Measurement) -> list[str]:
    """Return the corruptions, in the order of the arrays' rows."""
    return [key.removeprefix(_ACCURACY) for key in measurement.scalars if key.startswith(_ACCURACY)]


def _is_whole(measurement: Measurement) -> bool:
    accuracy = measurement.arrays.get("accuracy")
    return accuracy is not None and accuracy.ndim == 2 and len(_names(measurement)) == len(accuracy)


def _severities(measurement: Measurement) -> list[int]:
    return list(range(1, measurement.arrays["accuracy"].shape[1] + 1))


def _table(found: Measurements) -> Table:
    rows = []
    for _, name, one in found:
        clean = one.scalars.get("clean_accuracy")
        if clean is not None:
            rows.append((name, "clean", 0, clean.value, clean.low, clean.high))
        nothing = np.full_like(one.arrays["accuracy"], np.nan)
        cells = np.stack([one.arrays["accuracy"], *(one.arrays.get(end, nothing) for end in ("low", "high"))], axis=-1)
        for corruption, by_severity in zip(_names(one), cells.tolist(), strict=True):
            rows += [(name, corruption, s, *cell) for s, cell in zip(_severities(one), by_severity, strict=True)]
    return Table(("network", "corruption", "severity", "accuracy", "low", "high"), rows)


def _heat(found: Measurements) -> go.Figure:
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    most = max(len(_names(one)) for _, _, one in found)
    titles = [label(name, longest=PANEL_LONGEST) for _, name, _ in found]
    height = rows * (22 * most + 56) + COLOUR_BAR_HEIGHT
    spacing = 56 / height
    figure = make_canvas(
        height, rows, columns, titles, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=spacing
    )
    for at, (_, _, one) in enumerate(found):
        accuracy = finite(one.arrays["accuracy"])
        heat = go.Heatmap(
            x=_severities(one),
            y=[escape_plotly(name.replace("_", " ")) for name in _names(one)],
            z=accuracy,
            text=100 * accuracy,
            texttemplate="%{text:.0f}",
            textfont={"size": 10},
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            hovertemplate="%{y}, severity %{x}: %{z:.1%}<extra></extra>",
        )
        figure.add_trace(heat, at // columns + 1, at % columns + 1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False, dtick=1)
    title = "accuracy, by severity 1 to 5"
    put_colours_below(figure, title, colorscale=SEQUENTIAL, colorbar={"tickformat": ".0%"})
    return figure


def _slope(found: Measurements) -> go.Figure:
    figure = make_canvas(320, legend=2 * len(found))
    for place, name, one in found:
        clean = one.scalars.get("clean_accuracy")
        means = finite(one.arrays["accuracy"]).mean(0)
        x = _severities(one) if clean is None else [0, *_severities(one)]
        y = means if clean is None else [clean.value, *means]
        text = label(name, one, format_scalar(one.scalars.get("accuracy"), ".1%"))
        figure.add_trace(line(place, text, x, y, hovertemplate="severity %{x}: %{y:.1%}"))
    figure.update_xaxes(title_text="severity", dtick=1)
    figure.update_yaxes(title_text="mean accuracy", tickformat=".0%", rangemode="tozero")
    return figure


def _samples(measurement: Measurement) -> list[Picture]:
    """Return one image as it is and under each corruption, if the measurement has kept them."""
    samples = measurement.arrays.get("samples")
    names = ["clean", *_names(measurement)]
    if samples is None or len(samples) != len(names):
        return []
    return [Picture(name.replace("_", " "), _png(sample)) for name, sample in zip(names, samples, strict=True)]


def _png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, format="PNG")
    return buffer.getvalue()
