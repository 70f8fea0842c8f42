"""The data sets that come with vitclinic: `digits` and `shapes`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint
from vitclinic.data import shapes
from vitclinic.data.source import NumberedRecords, Source

_DIGITS = Path(__file__).with_name("digits.npz")
_SHAPES_DEFAULT = {"n": 4000, "texture": 0.0}
_SHAPES_VAL, _SHAPES_TEST = 500, 1000


class ArrayRecords(NumberedRecords):
    """Images in an array, [n, height, width] or [n, height, width, 3], one label each."""

    def __init__(self, source: str, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        super().__init__(source, labels)
        self.images = images

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        yield from self.images


class ShapesRecords:
    """Images of the procedural set, drawn as they are read."""

    def __init__(self, seed: int, split: str, count: int, texture_cue: float) -> None:
        self.seed, self.split, self.count, self.texture_cue = seed, split, count, texture_cue
        self.labels = np.arange(count, dtype=np.int64) % len(shapes.CLASSES)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"shapes {self.split} image {index}"

    def read(self, index: int) -> Image.Image:
        image, _, _ = shapes.example(self.seed, self.split, index, self.texture_cue)
        return Image.fromarray(image)

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        yield from shapes.examples(self.seed, self.split, self.count, self.texture_cue)

    def contents(self) -> list[int]:
        return list(range(len(self)))


def open_digits() -> Source:
    """Open the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels, grey.

    They are the test set of Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998 (CC BY 4.0): 17 grey levels, here stretched to 0..255.
    """
    with np.load(_DIGITS, allow_pickle=False) as stored:
        images, labels = np.rint(stored["images"] * (255 / 16)).astype(np.uint8), stored["labels"]
    records = ArrayRecords("digits", images, labels)
    return Source("digits", tuple(str(d) for d in range(10)), {"train": records}, fingerprint("digits", 1), ((8, 8), 1))


def open_shapes(spec: str, seed: int) -> Source:
    """Open `shapes`, `shapes:2000` or `shapes:n=2000,texture=0.8` (see `vitclinic.data.shapes`)."""
    options = _shapes_options(spec)
    count, cue = int(options["n"]), options["texture"]
    sizes = {"train": count, "val": _SHAPES_VAL, "test": _SHAPES_TEST}
    splits = {split: ShapesRecords(seed, split, size, cue) for split, size in sizes.items()}
    version = fingerprint("shapes", shapes.VERSION, seed, sizes, cue)
    return Source(spec, shapes.CLASSES, splits, version, ((32, 32), 3))


def _shapes_options(spec: str) -> dict[str, float]:
    options = dict(_SHAPES_DEFAULT)
    for item in filter(None, spec.partition(":")[2].split(",")):
        match = re.fullmatch(r"(?:(n|texture)=)?([0-9.]+)", item.strip())
        if match is None:
            raise DataError(f"'{spec}': cannot parse '{item}'; write shapes:2000 or shapes:n=2000,texture=0.8.")
        options[match[1] or "n"] = float(match[2])
    if options["n"] < 1 or not 0 <= options["texture"] <= 1:
        raise DataError(f"'{spec}': n must be at least 1 and texture between 0 and 1.")
    return options
