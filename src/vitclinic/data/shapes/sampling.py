"""Shape and texture of image i of a split, and the images with conflicting cues."""

from __future__ import annotations

from collections.abc import Iterator

from vitclinic._core.errors import DataError, did_you_mean
from vitclinic.data.shapes.drawing import Image, draw, draw_many, generator
from vitclinic.data.shapes.outlines import CLASSES, TEXTURES

_AT_ONCE = 50  # images that are drawn together

SPLITS = ("train", "val", "test")
_CONFLICT = len(SPLITS)  # the stream of the cue-conflict images, apart from every split


def labels(seed: int, split: str, index: int, texture_cue: float = 0.0) -> tuple[int, int]:
    """Return class and texture of image `index` of a split, without drawing it.

    Classes take turns, so that any prefix is balanced. With probability `texture_cue` the image wears the
    texture of its own class, otherwise any of the ten.
    """
    shape = index % len(CLASSES)
    own, other = generator((*_key(seed, split, index), 1)).random(2).tolist()
    return shape, shape if own < texture_cue else int(other * len(TEXTURES))


def example(seed: int, split: str, index: int, texture_cue: float = 0.0) -> tuple[Image, int, int]:
    """Return image `index` of a split with its class and its texture (see `labels`)."""
    shape, texture = labels(seed, split, index, texture_cue)
    return draw(_key(seed, split, index), shape, texture), shape, texture


def examples(seed: int, split: str, count: int, texture_cue: float = 0.0) -> Iterator[Image]:
    """Yield the first `count` images of a split, as `example` returns them, drawn many at a time."""
    for start in range(0, count, _AT_ONCE):
        indices = range(start, min(start + _AT_ONCE, count))
        shapes, textures = zip(*(labels(seed, split, index, texture_cue) for index in indices), strict=True)
        yield from draw_many([_key(seed, split, index) for index in indices], shapes, textures)


def cue_conflict(seed: int, index: int) -> tuple[Image, int, int]:
    """Return an image with the shape of one class and the texture of another, with both labels.

    Every 90 images hold each of the 90 pairs once, and every 10 hold each shape and each texture once.
    """
    n = len(CLASSES)
    shape = index % n
    texture = (shape + 1 + index // n % (n - 1)) % n
    return draw((seed, _CONFLICT, index), shape, texture), shape, texture


def _key(seed: int, split: str, index: int) -> tuple[int, int, int]:
    if split not in SPLITS:
        known = ", ".join(SPLITS)
        raise DataError(f"`shapes` has no split '{split}', only {known}.{did_you_mean(split, SPLITS)}")
    return seed, SPLITS.index(split), index
