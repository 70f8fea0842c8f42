"""`shapes`: ten drawn shapes in ten textures, a set that needs no download.

Shape, texture, colour, place, size, tilt, background, clutter and noise are drawn independently, so that the
outline is the only thing that tells the class. Texture k is the partner of class k: `texture_cue` makes it a
shortcut in training, and `cue_conflict` asks afterwards which of the two a network looks at [Geirhos 2019].

Image i of a split depends on (seed, split, i) and on nothing else: 2,000 images are a prefix of 4,000, and
workers may draw in any order. Only `Generator.random` of PCG64 is used, the stream least likely to change
between numpy releases; sines may differ in the last bit between machines, and so, rarely, a pixel by a level.

How hard, without augmentation, on 1,000 test images: a thin ResNet-18 reaches 83% after 12 epochs on 2,000
images, all of which it then knows, and 96% after two epochs on 20,000. A ViT of width 96, depth 6 and patch 4
reaches 42% from 2,000 and 44% from 20,000 after 23,000 images seen: at 250 images/s, about 90 seconds.
"""

from __future__ import annotations

from vitclinic._core.errors import DataError, did_you_mean
from vitclinic.data.shapes.outlines import CLASSES, TEXTURES
from vitclinic.data.shapes.scene import Image, draw, generator, mask

SPLITS = ("train", "val", "test")
_CONFLICT = len(SPLITS)  # the stream of the cue-conflict images, apart from every split

VERSION = 1
"""Version of the drawing code: a new one invalidates every stored set and changes every digest."""

__all__ = ["CLASSES", "SPLITS", "TEXTURES", "cue_conflict", "draw", "example", "labels", "mask"]


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
