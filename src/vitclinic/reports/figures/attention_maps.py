"""What networks look at in a handful of images [chen2022 Fig. 3]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic.measurement import Measurement
from vitclinic.pictures import beside, png
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Picture, Table, draws, measured

_LARGEST = 224
"""Pixels of the longer side of an image on the page, at most."""
_PIXELS = 24 * _LARGEST**2
"""Of all pictures together, at most: photographs take some two bytes each, and a page is to stay small."""
_NEEDED = ("maps", "grid_maps", "images", "numbers")

Looks = list[tuple[str, Measurement]]
"""Networks that have looked at the same images."""


@draws("attention_maps")
def attention_maps(examined: Sequence[Examined]) -> list[Figure]:
    found = [(name, one) for _, name, one in measured(examined, "attention_maps") if _is_whole(one)]
    if not found:
        return []
    groups = _by_images(found)
    panels = sum(len(looks[0][1].arrays["numbers"]) * (1 + len(looks)) for looks in groups)
    side = min(_LARGEST, int(math.sqrt(_PIXELS / max(1, panels))))
    return [
        Figure(
            name="attention-maps-images",
            title="Where attention looks",
            reading="Each picture is an image and, to its right, the same in grey under the attention of the class"
            " token in the last attention layer (without a class token, of all patches), from dark blue, the map's"
            " lowest value, to light yellow, its highest. Each map has its own scale, so look up the values in the"
            " table before calling one sharper than another.",
            paper="Chen et al. 2022, Fig. 3 (App. E.2)",
            table=_table(found),
            pictures=[picture for looks in groups for picture in _pictures(looks, side)],
        )
    ]


def _is_whole(one: Measurement) -> bool:
    arrays = [one.arrays.get(name) for name in _NEEDED]
    return all(array is not None and len(array) == len(one.arrays["numbers"]) for array in arrays)


def _by_images(found: Looks) -> list[Looks]:
    """Networks that have looked at the same pixels share their pictures."""
    groups: dict[tuple[bytes, tuple[int, ...], bytes], Looks] = {}
    for name, one in found:
        numbers, images = one.arrays["numbers"], one.arrays["images"]
        groups.setdefault((numbers.tobytes(), images.shape, images.tobytes()), []).append((name, one))
    return list(groups.values())


def _pictures(looks: Looks, side: int) -> list[Picture]:
    """Each image beside the maps of all networks; larger ones are reduced to a longer side of so many pixels."""
    first = looks[0][1].arrays
    who = "; ".join(name for name, _ in looks)
    return [
        Picture(f"Image {number}: {who}", png(_shown(image, [one.arrays["maps"][place] for _, one in looks], side)))
        for place, (number, image) in enumerate(zip(first["numbers"], first["images"], strict=True))
    ]


def _shown(image: NDArray[np.uint8], maps: Sequence[NDArray[np.float64]], side: int) -> NDArray[np.uint8]:
    row = beside(image, *(np.nan_to_num(attention) for attention in maps))
    if max(image.shape[:2]) <= side:
        return row
    height, width = row.shape[0], row.shape[1] // (1 + len(maps))
    factor = side / max(height, width)
    size = (round(width * factor) * (1 + len(maps)), round(height * factor))
    return np.asarray(Image.fromarray(row).resize(size, Image.Resampling.LANCZOS))


def _table(found: Looks) -> Table:
    """The maps on their grids."""
    rows = [
        (name, int(number), row, column, float(value))
        for name, one in found
        for number, grid in zip(one.arrays["numbers"], one.arrays["grid_maps"], strict=True)
        for (row, column), value in np.ndenumerate(grid)
    ]
    return Table(("network", "image", "row", "column", "attention"), rows)
