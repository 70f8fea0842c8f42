"""What networks look at in a handful of images [chen2022 Fig. 3]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic.measurement import Measurement
from vitclinic.pictures import beside, png
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Picture, Table, draws, measured

_LARGEST = 224
"""Pixels of the longer side of an image on the page."""
_NEEDED = ("maps", "grid_maps", "images", "numbers")

Looks = list[tuple[str, Measurement]]
"""Networks that have looked at the same images."""


@draws("attention_maps")
def attention_maps(examined: Sequence[Examined]) -> list[Figure]:
    found = [(name, one) for _, name, one in measured(examined, "attention_maps") if _is_whole(one)]
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
            table=_table(found),
            pictures=[picture for looks in _by_images(found) for picture in _pictures(looks)],
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


def _pictures(looks: Looks) -> list[Picture]:
    """An image beside the maps of all networks."""
    first = looks[0][1].arrays
    who = "; ".join(name for name, _ in looks)
    return [
        Picture(f"Image {number}: {who}", png(_shown(image, [one.arrays["maps"][place] for _, one in looks])))
        for place, (number, image) in enumerate(zip(first["numbers"], first["images"], strict=True))
    ]


def _shown(image: NDArray[np.uint8], maps: Sequence[NDArray[np.float64]]) -> NDArray[np.uint8]:
    row = Image.fromarray(beside(image, *(np.nan_to_num(attention) for attention in maps)))
    factor = _LARGEST / max(row.width / (1 + len(maps)), row.height)
    if factor < 1:
        row = row.resize((round(row.width * factor), round(row.height * factor)), Image.Resampling.LANCZOS)
    return np.asarray(row)


def _table(found: Looks) -> Table:
    """The maps on their grids."""
    rows = [
        (name, int(number), row, column, float(value))
        for name, one in found
        for number, grid in zip(one.arrays["numbers"], one.arrays["grid_maps"], strict=True)
        for (row, column), value in np.ndenumerate(grid)
    ]
    return Table(("network", "image", "row", "column", "attention"), rows)
