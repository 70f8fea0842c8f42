"""`shapes`: ten drawn shapes in ten textures, a set that needs no download.

Shape, texture, colour, place, size, tilt, background, clutter and noise are drawn independently, so that the
outline is the only thing that tells the class. Texture k is the partner of class k: `texture_cue` makes it a
shortcut in training, and `cue_conflict` asks afterwards which of the two a network looks at [Geirhos 2019].

Image i of a split depends on (seed, split, i) and on nothing else: 2,000 images are a prefix of 4,000, and
workers may draw in any order. Only `Generator.random` of PCG64 is used, the stream least likely to change
between numpy releases; sines may differ in the last bit between machines, a pixel then by one level at most.

Coordinates: the image is [-1, 1]^2 with y upwards. Arrays are (size, size) unless the name says otherwise: the
suffix `_hwc` has colour last, `_n` is one entry per clutter fragment, `_nhw` one field per fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vitclinic.errors import DataError, did_you_mean

Field = NDArray[np.float32]
Image = NDArray[np.uint8]

SPLITS = ("train", "val", "test")
_CONFLICT = len(SPLITS)  # the stream of the cue-conflict images, apart from every split
_TURN = np.float32(2 * np.pi)

# What sets the difficulty. With these, 2,000 images leave a small network far from perfect (numbers in the
# docstring of `example`); a change here changes every result on `shapes`, and the golden test says so.
_SCALE = (0.42, 0.72)  # circumradius of the shape, of half the image
_SHIFT = 0.28  # the centre moves at most this far
_TILT = np.pi / 5  # more would only add hardness: no class is another one turned
_STRETCH = 0.22  # log of the largest aspect ratio, of half of it each way
_WOBBLE = 0.07  # of the outline, in radii
_FRAGMENTS = 6
_NOISE = (0.02, 0.08)
_DEPTH = np.float32(0.5)
_INVERTED = 0.0
_PLAIN = 0.8
_PLAINS = 3
_FILLED = 1
_GAPS = 1


# ---------------------------------------------------------------------------------------------- the outlines
# Each takes the unit frame and v in [0, 1], which varies the proportions within the class, and returns the signed
# distance to the outline (negative inside), exact near the edges, where anti-aliasing needs it.


def _star_polygon(x: Field, y: Field, points: int, inner: float) -> Field:
    """Tips at radius 1, the first one up, and notches at radius `inner`; folded into half of one sector."""
    half = np.float32(np.pi / points)
    angle = np.abs((np.arctan2(x, y) + half) % (2 * half) - half)
    radius = np.hypot(x, y)
    edge_x, edge_y = inner * np.cos(half) - 1.0, inner * np.sin(half)
    normal_x, normal_y = np.array([edge_y, -edge_x], np.float32) / np.float32(np.hypot(edge_x, edge_y))
    return (radius * np.cos(angle) - 1) * normal_x + radius * np.sin(angle) * normal_y


def _box(x: Field, y: Field, half_width: float, half_height: float) -> Field:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _disc(x: Field, y: Field, v: float) -> Field:
    return np.hypot(x, y) - 0.85


def _ring(x: Field, y: Field, v: float) -> Field:
    hole = 0.3 + 0.3 * v
    return np.abs(np.hypot(x, y) - (0.9 + hole) / 2) - (0.9 - hole) / 2


def _square(x: Field, y: Field, v: float) -> Field:
    return _box(x, y, 0.75, 0.75)


def _triangle(x: Field, y: Field, v: float) -> Field:
    return _star_polygon(x, y + 0.2, 3, 0.5) - 0.1


def _star(x: Field, y: Field, v: float) -> Field:
    return _star_polygon(x, y, 5, 0.4 + 0.15 * v) - 0.05


def _cross(x: Field, y: Field, v: float) -> Field:
    arm = 0.22 + 0.16 * v
    return np.minimum(_box(x, y, arm, 0.9), _box(x, y, 0.9, arm))


def _crescent(x: Field, y: Field, v: float) -> Field:
    return np.maximum(np.hypot(x, y) - 0.9, 0.75 - np.hypot(x - (0.4 + 0.2 * v), y))


def _heart(x: Field, y: Field, v: float) -> Field:
    """A square on its corner, with a disc on each of its upper sides."""
    h = np.float32(0.82)
    x, y = np.abs(x), y + 0.1
    return np.minimum((x + np.abs(y) - h) * np.float32(0.5**0.5), np.hypot(x - h / 2, y - h / 2) - h * 0.5**0.5)


def _arrow(x: Field, y: Field, v: float) -> Field:
    shaft, width = 0.18 + 0.14 * v, 0.78
    slope = np.float32(1 / np.hypot(0.9, width))
    head = np.maximum((np.abs(x) * 0.9 + (y - 0.95) * width) * slope, 0.05 - y)
    return np.minimum(head, _box(x, y + 0.4, shaft, 0.55))


def _spiral(x: Field, y: Field, v: float) -> Field:
    """Archimedes' spiral r = g t over two turns t, as a band."""
    pitch = 0.46
    radius, turn = np.hypot(x, y), np.arctan2(y, x) / _TURN + 0.5
    arm = np.clip(np.rint(radius / pitch - turn), 0, 1) + turn
    return np.abs(radius - pitch * arm) - (0.11 + 0.05 * v)


_OUTLINES: dict[str, Callable[[Field, Field, float], Field]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "crescent": _crescent,
    "heart": _heart,
    "arrow": _arrow,
    "spiral": _spiral,
}
CLASSES: tuple[str, ...] = tuple(_OUTLINES)


# ---------------------------------------------------------------------------------------------- the textures
# Each takes a turned and shifted frame in periods, and 64 numbers in [0, 1] for those that need more chance.


def _two_tone(wave: Field) -> Field:
    """A wave in [-1, 1] to a soft two-tone pattern in [0, 1]: crisp, yet without aliasing at 32 pixels."""
    return np.clip(wave * np.float32(1.2) + np.float32(0.5), 0, 1)


def _blobs(u: Field, w: Field, chance: Field) -> Field:
    turn, phase = chance[:5, None, None] * _TURN, chance[5:10, None, None] * _TURN
    return _two_tone(np.sin((np.cos(turn) * u + np.sin(turn) * w) * np.float32(4) + phase).sum(0) * np.float32(0.6))


def _mosaic(u: Field, w: Field, chance: Field) -> Field:
    cells = np.floor(u * 2).astype(np.intp) % 8 * 8 + np.floor(w * 2).astype(np.intp) % 8
    return chance[cells]


_PATTERNS: dict[str, Callable[[Field, Field, Field], Field]] = {
    "stripes": lambda u, w, chance: _two_tone(np.sin(u * _TURN)),
    "checks": lambda u, w, chance: _two_tone(3 * np.sin(u * _TURN / 2) * np.sin(w * _TURN / 2)),
    "dots": lambda u, w, chance: _two_tone(np.cos(u * _TURN) + np.cos(w * _TURN) - np.float32(0.5)),
    "waves": lambda u, w, chance: _two_tone(np.sin(u * _TURN + 2 * np.sin(w * _TURN / 2))),
    "rings": lambda u, w, chance: _two_tone(np.sin(np.hypot(u, w) * _TURN)),
    "gradient": lambda u, w, chance: np.clip(u / 4 + np.float32(0.5), 0, 1),
    "blobs": _blobs,
    "mosaic": _mosaic,
    "net": lambda u, w, chance: _two_tone(3 * np.maximum(np.cos(u * _TURN), np.cos(w * _TURN)) - np.float32(2.2)),
    "rays": lambda u, w, chance: _two_tone(np.sin(np.arctan2(u, w) * 6)),
}
TEXTURES: tuple[str, ...] = tuple(_PATTERNS)


# ------------------------------------------------------------------------------------------------ the scene


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[Field, Field]:
    """x and y of the pixel centres."""
    centres = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    x, y = np.meshgrid(centres, -centres)
    return x, y


def _between(chance: float, low: float, high: float) -> float:
    return low + chance * (high - low)


def _turned(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return c * x + s * y, c * y - s * x


def _coverage(distance: Field, size: int) -> Field:
    """Share of each pixel inside, from the signed distance in image units: exact for a straight upright edge."""
    return np.clip(np.float32(0.5) - distance * np.float32(size / 2), 0, 1)


def mask(key: tuple[int, ...], shape: int, size: int = 32) -> Field:
    """Coverage in [0, 1] of the shape that `draw` would draw for this key: the truth for a segmentation."""
    return _shape_mask(_generator(key).random(16), shape, size)


def _generator(key: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def _shape_mask(chance: NDArray[np.float64], shape: int, size: int) -> Field:
    c = chance.tolist()
    scale, stretch = _between(c[0], *_SCALE), np.exp(_between(c[1], -_STRETCH, _STRETCH) / 2)
    x, y = _grid(size)
    x, y = x - np.float32(_between(c[2], -_SHIFT, _SHIFT)), y - np.float32(_between(c[3], -_SHIFT, _SHIFT))
    x, y = _turned(x, y, _between(c[4], -_TILT, _TILT))
    x, y = x / np.float32(scale * stretch), y * np.float32(stretch / scale)
    wobble, phase = np.float32(_WOBBLE * c[5]), np.float32(c[6] * 2 * np.pi)
    x, y = x + wobble * np.sin(3 * y + phase), y + wobble * np.sin(3 * x - phase)
    if c[7] < 0.5:  # mirrored: matters to the crescent and the spiral
        x = -x
    return _coverage(_OUTLINES[CLASSES[shape]](x, y, c[8]) * np.float32(scale), size)


def _fragments(chance: NDArray[np.float64], size: int) -> Field:
    """Coverage `_nhw` of the clutter: bits of arcs from nearly straight to hooked, cut by a disc about their middle."""
    c = chance.reshape(6, _FRAGMENTS, 1, 1).astype(np.float32)
    x, y = _grid(size)
    middle_x, middle_y, angle = c[0] * 2 - 1, c[1] * 2 - 1, c[2] * _TURN
    radius, half_width, half_length = 0.15 + c[3], 0.05 + 0.07 * c[4], 0.15 + 0.2 * c[5]
    dx, dy = x - middle_x, y - middle_y
    band = np.abs(np.hypot(dx - radius * np.cos(angle), dy - radius * np.sin(angle)) - radius) - half_width
    return _coverage(np.maximum(band, np.hypot(dx, dy) - half_length), size)


def _palette(chance: NDArray[np.float64]) -> tuple[Field, Field, Field, Field]:
    """Two colours of the ground, two of the fill and one of the plain clutter, any hue each.

    The fill is lighter than the ground (or, where everything is inverted, darker), the clutter anything between.
    """
    colours = chance[:15].reshape(5, 3).astype(np.float32)
    ground = _DEPTH * colours[:2]
    fill = 1 - _DEPTH * colours[2:4]
    plain = colours[4] * np.float32(_PLAIN)
    if chance[15] < _INVERTED:
        ground, fill, plain = 1 - ground, 1 - fill, 1 - plain
    return ground[0], ground[1], fill, plain


def draw(key: tuple[int, ...], shape: int, texture: int, size: int = 32) -> Image:
    """The image (size, size, 3) of a shape in a texture; all else is random and depends on `key` alone.

    The same key with another shape, texture or size is the same scene with that one thing changed.
    """
    rng = _generator(key)
    shape_chance, texture_chance, ground_chance = rng.random(16), rng.random(68), rng.random(16).astype(np.float32)
    palette, clutter = _palette(rng.random(16)), _fragments(rng.random(6 * _FRAGMENTS), size)
    ground, ground_far, fill_pair, plain = palette
    x, y = _grid(size)

    u, w = _turned(x, y, texture_chance[0] * 2 * np.pi)
    periods = np.float32(_between(texture_chance[1], 2.2, 3.6))
    u, w = u * periods + np.float32(texture_chance[2]), w * periods + np.float32(texture_chance[3])
    pattern = _PATTERNS[TEXTURES[texture]](u, w, texture_chance[4:].astype(np.float32))
    fill_hwc = fill_pair[0] + pattern[..., None] * (fill_pair[1] - fill_pair[0])

    g = ground_chance
    swell = np.sin(x * (4 * g[0] - 2) + y * (4 * g[1] - 2) + g[2] * _TURN)
    swell = swell + np.sin(x * (12 * g[3] - 6) + y * (12 * g[4] - 6) + g[5] * _TURN)
    image_hwc = ground + (0.5 + 0.25 * swell)[..., None] * (ground_far - ground)

    # Clutter in a colour of its own lies behind; two bits wear the shape's own fill, so that colour and texture do
    # not segment it; and one bit of ground passes over it, so that no single edge is to be relied on.
    image_hwc += clutter[:_PLAINS].max(0)[..., None] * (plain - image_hwc)
    filled = np.maximum(_shape_mask(shape_chance, shape, size) * (1 - clutter[5] * _GAPS), clutter[3:3+_FILLED].max(0, initial=0))
    image_hwc += filled[..., None] * (fill_hwc - image_hwc)

    level = np.float32(_between(float(g[6]), *_NOISE))
    noise = rng.random((2, size, size, 3), dtype=np.float32)
    image_hwc += level * np.float32(6**0.5) * (noise[0] - noise[1])  # triangular, of standard deviation `level`
    return (np.clip(image_hwc, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)


def example(seed: int, split: str, index: int, texture_cue: float = 0.0) -> tuple[Image, int, int]:
    """Image `index` of a split, its class and its texture.

    Classes take turns, so that any prefix is balanced. With probability `texture_cue` the image wears the texture of
    its own class, otherwise any of the ten.
    """
    if split not in SPLITS:
        raise DataError(f"`shapes` has no split '{split}', only {', '.join(SPLITS)}.{did_you_mean(split, SPLITS)}")
    key = (seed, SPLITS.index(split), index)
    shape = index % len(CLASSES)
    own, other = _generator((*key, 1)).random(2)
    texture = shape if own < texture_cue else int(other * len(TEXTURES))
    return draw(key, shape, texture), shape, texture


def cue_conflict(seed: int, index: int) -> tuple[Image, int, int]:
    """An image with the shape of one class in the texture of another, with both labels.

    Every 90 images hold each of the 90 pairs once, and every 10 hold each shape and each texture once.
    """
    n = len(CLASSES)
    shape = index % n
    texture = (shape + 1 + index // n % (n - 1)) % n
    return draw((seed, _CONFLICT, index), shape, texture), shape, texture
