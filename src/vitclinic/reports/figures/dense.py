"""Masks and boxes: the score of each class, and the worst images beside what is there and what was predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitclinic._core.images import Picture, encode_small
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.errors import OPEN_NETWORKS
from vitclinic.reports.figures.worst_images import has_arrays, list_worst, short_name
from vitclinic.reports.image_lists import Album, Listing, Row, Thumbnail, isolate, mark_up

MOST_IMAGES, FEWEST_IMAGES = 36, 6
"""Images of all networks of a page together, and of each of many."""
COLOURS = (
    (31, 119, 180),
    (255, 127, 14),
    (44, 160, 44),
    (214, 39, 40),
    (148, 103, 189),
    (140, 86, 75),
    (227, 119, 194),
    (188, 189, 34),
    (23, 190, 207),
    (255, 187, 120),
    (152, 223, 138),
    (174, 199, 232),
    (255, 152, 150),
    (197, 176, 213),
    (219, 219, 141),
    (127, 127, 127),
)
"""Colours of the classes, by their numbers; of more classes, some have the same."""
_SHARE = 0.6
"""Share of a class's colour in a mask; the image has the rest."""
_VOID = 255
_SIDE = 104
"""Images with a smaller side are enlarged by an integer factor, so that lines and edges are seen."""


@dataclass(frozen=True)
class _Kind:
    """Texts and arrays of the figure of one kind of answer."""

    name: str
    title: str
    score: str
    array: str
    """Array of the score of each class; that of how often the class is there follows."""
    counts: str
    count: str
    """How often a class is there, in words."""
    reading: str
    show: Callable[[Any, list[str], int], Thumbnail]
    """Function from the arrays, the classes and the number of an image to its thumbnail."""


@draws("segmentation")
def segmentation(exams: Sequence[ExamView]) -> list[Figure]:
    """Show the IoU of each class, then the worst images, for each network."""
    kind = _Kind(
        name="masks",
        title="Masks",
        score="IoU",
        array="class_iou",
        counts="class_images",
        count="in {:,} images",
        reading="Intersection over union of each class with its colour; then the images with the smallest mean over the"
        " classes that are in them: the image, what is there, and what was predicted. Look whether whole objects take"
        " another class, or only edges are off.",
        show=_show_masks,
    )
    shown = ("images", "names", "predicted", "truth", "iou")
    return _draw(kind, exams, "segmentation", [f"shown_{key}" for key in shown])


@draws("detection")
def detection(exams: Sequence[ExamView]) -> list[Figure]:
    """Show the AP of each class, then the worst images, for each network."""
    kind = _Kind(
        name="boxes",
        title="Objects",
        score="AP",
        array="class_ap",
        counts="class_objects",
        count="{:,} objects",
        reading="AP of the boxes of each class with its colour; then the images in which least was found of what is"
        " there, or most that is not: the image, its objects, and the detections with a score of at least 50%. Look"
        " whether an object is missed, named wrongly or framed badly.",
        show=_show_boxes,
    )
    shown = ["shown_images", "shown_names", "shown_f1", "shown_found_scores"]
    shown += [f"shown_{place}_{key}" for place in ("found", "truth") for key in ("rows", "boxes", "labels")]
    return _draw(kind, exams, "detection", shown)


def _draw(kind: _Kind, exams: Sequence[ExamView], probe: str, shown: Sequence[str]) -> list[Figure]:
    """Return a figure for each network whose measurement has the arrays of the kind and those named in `shown`."""
    wanted = ("classes", kind.array, kind.counts, *shown)
    found = [each for each in select_usable(exams, probe) if has_arrays(each[2], *wanted)]
    return [_make_figure(kind, place, name, one, len(found)) for place, name, one in found]


def _make_figure(kind: _Kind, place: int, name: str, one: Measurement, networks: int) -> Figure:
    arrays, classes = one.arrays, one.arrays["classes"].tolist()
    count = min(len(arrays["shown_images"]), max(FEWEST_IMAGES, MOST_IMAGES // networks))
    thumbnails = [kind.show(arrays, classes, number) for number in range(count)]
    scores = zip(classes, arrays[kind.array].tolist(), arrays[kind.counts].tolist(), strict=True)
    rows = [(label, None if np.isnan(score) else score, kind.count.format(times)) for label, score, times in scores]
    scored = Listing(f"{kind.score} of each class", _class_rows(one, kind.array))
    return Figure(
        name=f"{kind.name}-{place}",
        title=f"{kind.title} of {name}" if networks > 1 else kind.title,
        reading=kind.reading,
        paper="Hyeon-Woo et al. 2023, Tables 6, 7",
        table=Table(("class", kind.score, "of"), rows),
        album=Album(thumbnails, [scored, list_worst(thumbnails)]),
        heavy=networks > OPEN_NETWORKS,
    )


def _class_rows(one: Measurement, key: str) -> list[Row]:
    """Return a row for each class, with its colour and the length of its bar."""
    rows = []
    for number, (name, value) in enumerate(zip(one.arrays["classes"].tolist(), one.arrays[key].tolist(), strict=True)):
        colour = Markup('<i class="swatch" style="background:rgb({},{},{})"></i> ').format(*_colour(number))
        nowhere = np.isnan(value)
        fact = "nowhere in these images" if nowhere else _with_interval(one, key, number, value)
        rows.append(Row(colour + mark_up("{}", name), fact, share=None if nowhere else value))
    return rows


def _with_interval(one: Measurement, key: str, number: int, value: float) -> str:
    if not has_arrays(one, f"{key}_low", f"{key}_high"):
        return f"{value:.1%}"
    low, high = (float(one.arrays[f"{key}_{end}"][number]) for end in ("low", "high"))
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def _colour(number: int) -> tuple[int, int, int]:
    return COLOURS[number % len(COLOURS)]


def _show_masks(arrays: Any, classes: list[str], number: int) -> Thumbnail:
    image = _as_colours(arrays["shown_images"][number])
    truth, predicted = arrays["shown_truth"][number], arrays["shown_predicted"][number]
    row = [image, _paint(image, truth), _paint(image, predicted)]
    sentence = f"mean IoU {arrays['shown_iou'][number]:.0%}"
    names: tuple[str, ...] = ()
    if (wrong := (truth != predicted) & (truth != _VOID)).any():
        pairs, counts = np.unique(np.stack([truth[wrong], predicted[wrong]]), axis=1, return_counts=True)
        label, taken = pairs[:, counts.argmax()].tolist()
        sentence += "; most: {} taken for {}"
        names = (classes[label], classes[taken])
    return _join(row, sentence, names, short_name(str(arrays["shown_names"][number])))


def _paint(image: Picture, mask: NDArray[np.uint8]) -> Picture:
    """Return an image with the colour of its class over each pixel; void pixels stay as they are."""
    known = mask != _VOID
    colours = np.array([_colour(number) for number in range(_VOID)], np.float64)
    painted = image.astype(np.float64)
    painted[known] = _SHARE * colours[mask[known]] + (1 - _SHARE) * painted[known]
    return np.rint(painted).astype(np.uint8)


def _show_boxes(arrays: Any, classes: list[str], number: int) -> Thumbnail:
    image = _as_colours(arrays["shown_images"][number])
    framed = {
        kind: [arrays[f"shown_{kind}_{key}"][arrays[f"shown_{kind}_rows"] == number] for key in ("boxes", "labels")]
        for kind in ("truth", "found")
    }
    scores = arrays["shown_found_scores"][arrays["shown_found_rows"] == number].tolist()
    there = [classes[label] for label in framed["truth"][1].tolist()]
    found = [classes[label] for label in framed["found"][1].tolist()]
    sentence = f"F1 {arrays['shown_f1'][number]:.0%}; there: " + (", ".join("{}" for _ in there) or "nothing")
    sentence += "; found: " + (", ".join(f"{{}} {score:.0%}" for score in scores) or "nothing")
    row = [image, _frame(image, *framed["truth"]), _frame(image, *framed["found"])]
    return _join(row, sentence, (*there, *found), short_name(str(arrays["shown_names"][number])))


def _frame(image: Picture, boxes: NDArray[np.float64], labels: NDArray[np.int64]) -> Picture:
    """Return an image, enlarged if small, with boxes in the colours of their classes."""
    factor = _factor(image)
    picture = Image.fromarray(image.repeat(factor, axis=0).repeat(factor, axis=1))
    pen = ImageDraw.Draw(picture)
    for box, label in zip((boxes * factor).tolist(), labels.tolist(), strict=True):
        left, top, right, bottom = box
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=_colour(label), width=2)
    return np.asarray(picture)


def _factor(image: Picture) -> int:
    return max(1, math.ceil(_SIDE / int(min(image.shape[:2]))))


def _as_colours(image: Picture) -> Picture:
    return (
        image if image.ndim == 3 and image.shape[2] == 3 else np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)
    )


def _join(row: list[Picture], sentence: str, names: tuple[str, ...], file: str) -> Thumbnail:
    """Return pictures side by side as one image of an album; the small ones are enlarged to the size of the others."""
    height = max(each.shape[0] for each in row)
    alike = [each.repeat(height // each.shape[0], axis=0).repeat(height // each.shape[0], axis=1) for each in row]
    gap = np.full((height, 4, 3), 255, np.uint8)
    picture = np.concatenate([alike[0], gap, alike[1], gap, alike[2]], axis=1)
    description = sentence.format(*(isolate(name) for name in names))
    return Thumbnail(
        encode_small(picture), (picture.shape[1], picture.shape[0]), mark_up(sentence, *names), description, file
    )
