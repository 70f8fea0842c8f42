"""Reach and density of attention by layer, each head a dash; attention maps and saliency maps over images.

Saliency also shows how a class goes and comes with the pixels of its maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.images import beside, png
from vitclinic._core.records import Measurement, UnitRow
from vitclinic.reports.figure import (
    ExamView,
    Figure,
    Picture,
    Table,
    draws,
    escape_plotly,
    network_colour,
    select_usable,
)
from vitclinic.reports.figures.canvas import GREY, Floats, finite, label, line, make_canvas, trace_group
from vitclinic.reports.figures.depth import (
    Series,
    collect_series,
    overlay,
    places,
    read_heads,
    same_units,
    unit_names,
    unit_table,
)


def head_marks(found: Sequence[Series], array: str, divisor: str | None = None) -> list[go.Scatter]:
    """Return a dash for each head of each layer, divided by the value `divisor` of its layer if there is one."""
    shared = same_units(found)
    return [trace for one in found for trace in _marks(one, places(one, shared), array, divisor)]


def _marks(one: Series, x: Floats, array: str, divisor: str | None) -> list[go.Scatter]:
    values = read_heads(one.measurement, array)
    if values is None:
        return []
    rows = dict(zip((unit.depth for unit in one.measurement.units), values, strict=True))
    heads = np.stack([rows[unit.depth] / _divisor(unit, divisor) for unit in one.units])
    layers, numbers = np.nonzero(np.isfinite(heads))
    names = unit_names(one.units)
    return [
        go.Scatter(
            x=x[layers],
            y=heads[layers, numbers],
            mode="markers",
            marker={"size": 10, "symbol": "line-ew-open", "color": network_colour(one.place), "line": {"width": 1.2}},
            opacity=0.55,
            customdata=[(names[layer], int(head)) for layer, head in zip(layers, numbers, strict=True)],
            hovertemplate="%{customdata[0]}<br>head %{customdata[1]}: %{y:.4g}",
            **trace_group(one.place, one.label, shown=False),
        )
    ]


def _divisor(unit: UnitRow, name: str | None) -> float:
    if name is None:
        return 1.0
    return unit.values[name].value if name in unit.values else math.nan


@draws("attention_distance")
def attention_distance(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw how far attention looks, by layer and head."""
    found = collect_series(exams, "attention_distance", "distance")
    if not found:
        return []
    plot = overlay({"distance (sides of the grid)": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_distance"))
    plot.update_yaxes(rangemode="tozero")
    return [
        Figure(
            name="attention-distance-layers",
            title="Distance of attention by layer",
            reading="Each point is how far a query looks on average, rows and columns of the grid running from 0 to 1:"
            " 0 is every patch looking at itself, about 0.67 uniform attention; small dashes are heads. Divided by"
            " the number of other patches it is Hyeon-Woo et al.'s relative distance (in the table), which Context"
            " Broadcasting should leave as it is.",
            paper="Hyeon-Woo et al. 2023, Fig. 7b (H2)",
            table=unit_table(exams, "attention_distance", ["distance", "relative_distance"], heads="head_distance"),
            plot=plot,
        )
    ]


@draws("attention_entropy")
def attention_entropy(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the entropy of attention by layer and head, and that of the class token."""
    return [*_against_maximum(exams), *_of_class_token(exams)]


def _against_maximum(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "attention_entropy", "ratio")
    if not found:
        return []
    plot = overlay({"entropy / maximum": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_entropy", divisor="maximum"))
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    plot.add_hline(y=1, line=line, annotation={"text": "uniform attention", "yanchor": "bottom", "font": {"size": 11}})
    return [
        Figure(
            name="attention-entropy-layers",
            title="Entropy of attention by layer",
            reading="Each point is the mean entropy of a layer's attention, divided by that of uniform attention over"
            " the same keys; small dashes are its heads. Hyeon-Woo et al. found learned attention close to the"
            " maximum, which is attention that merely averages.",
            paper="Hyeon-Woo et al. 2023, Fig. 4 (H1)",
            table=unit_table(
                exams, "attention_entropy", ["ratio", "entropy", "upper", "maximum"], heads="head_entropy"
            ),
            plot=plot,
        )
    ]


def _of_class_token(exams: Sequence[ExamView]) -> list[Figure]:
    found = collect_series(exams, "attention_entropy", "class_entropy")
    if not found:
        return []
    return [
        Figure(
            name="attention-entropy-class",
            title="Entropy of the class token's attention",
            reading="Each point is the entropy of the class token's attention in one layer, mean over heads and"
            " images: the lower, the fewer patches it looks at. Hyeon-Woo et al. found that Context Broadcasting"
            " lowers it, most in deep layers.",
            paper="Hyeon-Woo et al. 2023, Fig. 7a (H2)",
            table=unit_table(exams, "attention_entropy", ["class_entropy", "patch_entropy"]),
            plot=overlay({"entropy (nats)": found}, "attention layer"),
        )
    ]


_LARGEST = 224
"""Pixels of the longer side of an image on the page, at most."""
_PIXELS = 24 * _LARGEST**2
"""Of all pictures together, at most: photographs take some two bytes each, and a page is to stay small."""
_NEEDED = ("maps", "grid_maps", "images", "numbers")

Looks = list[tuple[str, Measurement]]
"""Networks that have looked at the same images."""


@draws("attention_maps")
def attention_maps(exams: Sequence[ExamView]) -> list[Figure]:
    """Show each image beside the attention maps of all networks that looked at it."""
    found = [(name, one) for _, name, one in select_usable(exams, "attention_maps") if has_maps(one)]
    if not found:
        return []
    return [
        Figure(
            name="attention-maps-images",
            title="Where attention looks",
            reading="Each picture is an image and, to its right, the same in grey under the attention of the class"
            " token in the last attention layer (without a class token, of all patches), from dark blue, the map's"
            " lowest value, to light yellow, its highest. Each map has its own scale, so look up the values in the"
            " table before calling one sharper than another.",
            paper="Chen et al. 2022, Fig. 3 (App. E.2)",
            table=map_table(found, "attention"),
            pictures=draw_maps(found),
        )
    ]


def has_maps(one: Measurement) -> bool:
    """Tell whether images and maps are there, one for each number."""
    lengths = {len(one.arrays[name]) if name in one.arrays else None for name in _NEEDED}
    return len(lengths) == 1 and None not in lengths


def draw_maps(found: Looks) -> list[Picture]:
    """Return each image beside the maps of all networks that looked at it, small enough for a page."""
    groups = _group_by_images(found)
    panels = sum(len(looks[0][1].arrays["numbers"]) * (1 + len(looks)) for looks in groups)
    side = min(_LARGEST, int(math.sqrt(_PIXELS / max(1, panels))))
    return [picture for looks in groups for picture in _pictures(looks, side)]


def _group_by_images(found: Looks) -> list[Looks]:
    """Group the networks that looked at the same pixels: they share their pictures."""
    groups: dict[tuple[bytes, tuple[int, ...], bytes], Looks] = {}
    for name, one in found:
        numbers, images = one.arrays["numbers"], one.arrays["images"]
        groups.setdefault((numbers.tobytes(), images.shape, images.tobytes()), []).append((name, one))
    return list(groups.values())


def _pictures(looks: Looks, side: int) -> list[Picture]:
    """Return each image beside the maps of all networks, reduced to a longer side of at most `side` pixels."""
    first = looks[0][1].arrays
    who = "; ".join(name for name, _ in looks)
    return [
        Picture(f"Image {number}: {who}", png(_lay_out(image, [one.arrays["maps"][place] for _, one in looks], side)))
        for place, (number, image) in enumerate(zip(first["numbers"], first["images"], strict=True))
    ]


def _lay_out(image: NDArray[np.uint8], maps: Sequence[NDArray[np.float64]], side: int) -> NDArray[np.uint8]:
    row = beside(image, *(np.nan_to_num(attention) for attention in maps))
    if max(image.shape[:2]) <= side:
        return row
    height, width = row.shape[0], row.shape[1] // (1 + len(maps))
    factor = side / max(height, width)
    size = (round(width * factor) * (1 + len(maps)), round(height * factor))
    return np.asarray(Image.fromarray(row).resize(size, Image.Resampling.LANCZOS))


def map_table(found: Looks, value: str) -> Table:
    """Return the maps on their grids."""
    rows = [
        (name, int(number), row, column, float(value))
        for name, one in found
        for number, grid in zip(one.arrays["numbers"], one.arrays["grid_maps"], strict=True)
        for (row, column), value in np.ndenumerate(grid)
    ]
    return Table(("network", "image", "row", "column", value), rows)


_PAPER = "Petsiuk et al. 2018 (RISE, Sec. 4)"
_CURVES = {"insertion": "pixels inserted", "deletion": "pixels deleted"}

Found = Sequence[tuple[int, str, Measurement]]


@draws("saliency")
def saliency(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the curves of insertion and deletion, and the maps."""
    found = select_usable(exams, "saliency")
    return [*_curves([one for one in found if _has_curves(one[2])]), *_maps(found)]


def _has_curves(one: Measurement) -> bool:
    return all(f"{order}{curve}" in one.arrays for curve in _CURVES for order in ("", "shuffled_"))


def _curves(found: Found) -> list[Figure]:
    if not found:
        return []
    plot = make_canvas(320, 1, 2, list(_CURVES.values()), legend=2 * len(found), shared_yaxes=True)
    for column, curve in enumerate(_CURVES, start=1):
        for trace in (trace for one in found for trace in _lines(one, curve, shown=column == 1)):
            plot.add_trace(trace, 1, column)
    plot.update_xaxes(title_text="share of pixels", tickformat=".0%")
    plot.update_yaxes(title_text="probability of the class", rangemode="tozero", col=1)
    return [
        Figure(
            name="saliency-curves",
            title="What saliency maps are worth",
            reading="Each line is the probability of the class, mean over images, as the most salient pixels come into"
            " a blurred image (left) or leave the image (right); dotted, in the order of the same maps shuffled. A map"
            " that means something lies above its dotted line at the left and below it at the right.",
            paper=_PAPER,
            table=_table(found),
            plot=plot,
        )
    ]


def _lines(one: tuple[int, str, Measurement], curve: str, shown: bool) -> list[go.Scatter]:
    place, name, measurement = one
    method = escape_plotly(str(measurement.arrays["method"][0])) if "method" in measurement.arrays else ""
    traces = []
    for order, dash, width in (("", "solid", 2), ("shuffled_", "dot", 1.5)):
        y = finite(measurement.arrays[f"{order}{curve}"])
        trace = line(
            place,
            label(name, measurement, "shuffled" if order else method),
            np.linspace(0, 1, len(y)),
            y,
            shown,
            mode="lines",
            hovertemplate="%{x:.0%} of the pixels: %{y:.3f}",
        )
        traces.append(trace.update(line_dash=dash, line_width=width))
    return traces


def _table(found: Found) -> Table:
    rows = [
        (name, curve, order or "map", float(share), float(value))
        for _, name, one in found
        for curve in _CURVES
        for order in ("", "shuffled")
        for values in [one.arrays[f"{order}_{curve}" if order else curve]]
        for share, value in zip(np.linspace(0, 1, len(values)), values, strict=True)
    ]
    return Table(("network", "curve", "order", "share of pixels", "probability"), rows)


def _maps(found: Found) -> list[Figure]:
    looks = [(name, one) for _, name, one in found if has_maps(one)]
    if not looks:
        return []
    return [
        Figure(
            name="saliency-maps",
            title="Where the class comes from",
            reading="Each picture is an image and, to its right, the same in grey under the saliency of its class, from"
            " dark blue, the map's lowest value, to light yellow, its highest. Look at the curves before believing one:"
            " a map that means nothing looks as good.",
            paper="Selvaraju et al. 2017; Abnar and Zuidema 2020; Chefer et al. 2021 (Eq. 5)",
            table=map_table(looks, "saliency"),
            pictures=draw_maps(looks),
        )
    ]
