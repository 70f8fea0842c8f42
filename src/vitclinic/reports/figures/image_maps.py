"""Attention maps and saliency maps over images.

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
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import (
    ExamView,
    Figure,
    Picture,
    Table,
    draws,
    escape_plotly,
    select_usable,
)
from vitclinic.reports.figures.canvas import finite, label, line, make_canvas

_LARGEST = 224
"""Pixels of the longer side of an image on the page, at most."""
_PIXELS = 24 * _LARGEST**2
"""Of all pictures together, at most: photographs take some two bytes each, and a page is to stay small."""
_WIDEST = 720
"""Pixels of a row of heads, at most."""
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
        ),
        *_single_heads([(name, one) for name, one in found if "head_maps" in one.arrays]),
    ]


def _single_heads(found: Looks) -> list[Figure]:
    """Show maps of single heads, with one threshold and one scale for all networks and heads."""
    if not found:
        return []
    pictures, rows = [], []
    for looks in _group_by_images(found):
        for place, number in enumerate(looks[0][1].arrays["numbers"].tolist()):
            pictures.append(_draw_heads(looks, place, number))
        for name, one in looks:
            times = _times_uniform(one)
            heads = one.arrays["heads"].tolist()
            rows += [
                (name, number, head, float(times[place, at].max()), float((times[place, at] >= 1).mean()))
                for place, number in enumerate(one.arrays["numbers"].tolist())
                for at, head in enumerate(heads)
            ]
    return [
        Figure(
            name="attention-maps-heads",
            title="Where single heads look",
            reading="Each row is a network: the image, then the same in grey under the attention of single heads."
            " Colours run from uniform attention, dark blue, to the highest value of any head of any network on the"
            " image, light yellow, and what gets less than uniform attention has none: one threshold and one scale for"
            " all. A network whose heads colour much of the image gathers densely; one that colours objects alone does"
            " not.",
            paper="Hyeon-Woo et al. 2023, Fig. 10",
            table=Table(("network", "image", "head", "highest_times_uniform", "share_above_uniform"), rows),
            pictures=pictures,
        )
    ]


def _times_uniform(one: Measurement) -> NDArray[np.float64]:
    """Return the maps of single heads as multiples of uniform attention over the grid, [n, heads, height, width]."""
    rows, columns = one.arrays["grid_maps"].shape[1:]
    times: NDArray[np.float64] = np.nan_to_num(one.arrays["head_maps"].astype(np.float64)) * (rows * columns)
    return times


def _draw_heads(looks: Looks, place: int, number: int) -> Picture:
    maps = [_times_uniform(one)[place] for _, one in looks]
    scale = (1.0, max(float(each.max()) for each in maps))
    image = looks[0][1].arrays["images"][place]
    rows = [beside(image, *of_network, scale=scale) for of_network in maps]
    width = max(row.shape[1] for row in rows)
    gap = np.full((4, width, 3), 255, np.uint8)
    padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    stacked = np.concatenate([part for row in padded for part in (row, gap)][:-1])
    factor = min(1.0, _WIDEST / width)
    size = (round(width * factor), round(stacked.shape[0] * factor))
    small = np.asarray(Image.fromarray(stacked).resize(size, Image.Resampling.LANCZOS))
    who = "; ".join(f"{name}, heads {', '.join(map(str, one.arrays['heads'].tolist()))}" for name, one in looks)
    return Picture(f"Image {number}, from the top: {who}", png(small))


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
