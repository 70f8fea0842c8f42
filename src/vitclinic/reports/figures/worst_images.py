"""Images that a measurement keeps to be shown, with what the network said of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

from vitclinic._core.images import Picture, encode_small
from vitclinic._core.records import Measurement
from vitclinic.reports.image_lists import Listing, Row, Thumbnail, isolate, mark_up


@dataclass(frozen=True)
class Shown:
    """An image that is shown."""

    image: Picture
    name: str
    label: int
    predicted: int
    confidence: float
    own: float
    """Probability of its label."""


_A_ROW = 12
"""Images that a row of a list opens."""
_SHOWN = ("shown_images", "shown_names", "shown_labels", "shown_predicted", "shown_confidence", "shown_own")


def has_arrays(measurement: Measurement, *names: str) -> bool:
    """Tell whether a measurement, which may be of another version, has these arrays."""
    return all(name in measurement.arrays for name in names)


def read_shown(measurement: Measurement) -> list[Shown]:
    """Return the images that a measurement keeps, in its order; none if their pixels were not kept."""
    arrays = measurement.arrays
    if not has_arrays(measurement, *_SHOWN) or not len(arrays["shown_images"]):
        return []
    columns = [arrays["shown_images"], *(arrays[key].tolist() for key in _SHOWN[1:])]
    return [Shown(image, short_name(name), *rest) for image, name, *rest in zip(*columns, strict=True)]


def draw_thumbnail(shown: Shown, classes: list[str], suggested: int | None = None) -> Thumbnail:
    """Return an image as a page shows it: its label, and the class that it was taken for, or that is suggested."""
    label, other = classes[shown.label], classes[shown.predicted if suggested is None else suggested]
    if suggested is None:
        sentence = f"{{}} taken for {{}}, {shown.confidence:.0%} sure"
    else:
        sentence = f"labelled {{}} ({shown.own:.1%}), probably {{}}"
    description = sentence.format(isolate(label), isolate(other))
    height, width = shown.image.shape[:2]
    return Thumbnail(
        encode_small(shown.image), (width, height), mark_up(sentence, label, other), description, shown.name
    )


def list_worst(thumbnails: Sequence[Thumbnail], what: str = "Worst images first") -> Listing:
    """Return a list that opens images a dozen at a time, the first of them at once."""
    spans = [range(first, min(first + _A_ROW, len(thumbnails))) for first in range(0, len(thumbnails), _A_ROW)]
    return Listing(what, [Row(mark_up(f"{span.start + 1} to {span.stop}"), "", span) for span in spans], open_rows=1)


def short_name(name: str) -> str:
    """Return the name of an image without its folders, to keep local paths out of reports.

    Example:
        >>> short_name("/home/me/my photos/cat/1.png"), short_name("/home/me/photos.parquet row 7 (a/b.png)")
        ('1.png', 'photos.parquet row 7 (a/b.png)')
    """
    numbered = re.fullmatch(r"(.*?)( (?:row|image) \d+(?: \(.*\))?)", name, re.DOTALL)
    path, behind = (numbered[1], numbered[2]) if numbered else (name, "")
    kind = PureWindowsPath if "\\" in path and "/" not in path else PurePosixPath
    return kind(path).name + behind
