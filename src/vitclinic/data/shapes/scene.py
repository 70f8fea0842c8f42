"""The scene: a textured shape on a background, among clutter, with noise.

Coordinates: the image is [-1, 1]^2 with y upwards. A `Field` is (size, size) unless its name says otherwise: `_chw`
has a colour axis first, `_nhw` one field per clutter fragment.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.shapes.outlines import CLASSES, OUTLINES, PATTERNS, TEXTURES, TURN, Field, norm

Image = NDArray[np.uint8]

# What sets the difficulty. Most images are plain and a few are hard in one way or another (`_tail`, `_both`),
# as photographs are: a transformer then begins to learn within a minute, and yet a CNN does not solve the set
# from 2,000 images. A change here changes every result on `shapes`, and the golden test says so.
_SCALE = (0.56, 0.78)  # circumradius of the shape, of half the image
_SHIFT = 0.18  # how far the centre may move
_TILT = 0.8  # radians; no class is another one turned
_STRETCH = 0.2  # the log of width over height, at most
_WOBBLE = 0.07  # of the outline, in radii
_DEPTH = (0.4, 0.65)  # spread of the colours of ground and fill; above 0.5 they may meet
_INVERTED = 0.05  # share of images whose fill is the darker one
_NOISE = (0.02, 0.12)  # standard deviation
_FRAGMENTS = 6  # of the clutter: three plain, one of ground, two of the fill


def _tail(chance: float, low: float, high: float) -> float:
    """Return a number from low to high, mostly near low."""
    return low + chance**2 * (high - low)


def _both(chance: float, limit: float) -> float:
    """Return a number from -limit to limit, mostly near 0."""
    return limit * (2 * chance - 1) ** 3


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[Field, Field]:
    """Return x and y of the pixel centres."""
    centres = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    x, y = np.meshgrid(centres, -centres)
    return x, y


def _between(chance: float, low: float, high: float) -> float:
    return low + chance * (high - low)


def _rotate(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return c * x + s * y, c * y - s * x


def _coverage(distance: Field, size: int) -> Field:
    """Return the share of each pixel inside, from the signed distance in image units; exact for an upright edge."""
    share: Field = np.clip(np.float32(0.5) - distance * np.float32(size / 2), 0, 1)
    return share


def mask(key: tuple[int, ...], shape: int, size: int = 32) -> Field:
    """Return the coverage in [0, 1] of the shape that `draw` draws for this key: ground truth for segmentation."""
    return _shape_mask(generator(key).random(16), shape, size)


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Return the random generator of a key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def _shape_mask(chance: NDArray[np.float64], shape: int, size: int) -> Field:
    c = chance.tolist()
    scale, stretch = _between(c[0], *_SCALE), np.exp(_between(c[1], -_STRETCH, _STRETCH) / 2)
    x, y = _grid(size)
    x, y = x - np.float32(_both(c[2], _SHIFT)), y - np.float32(_both(c[3], _SHIFT))
    x, y = _rotate(x, y, _both(c[4], _TILT))
    x, y = x / np.float32(scale * stretch), y * np.float32(stretch / scale)
    wobble, phase = np.float32(_WOBBLE * c[5]), np.float32(c[6] * 2 * np.pi)
    x, y = x + wobble * np.sin(3 * y + phase), y + wobble * np.sin(3 * x - phase)
    if c[7] < 0.5:  # mirrored: matters to the crescent and the spiral
        x = -x
    return _coverage(OUTLINES[CLASSES[shape]](x, y, c[8]) * np.float32(scale), size)


def _fragments(chance: NDArray[np.float64], size: int) -> Field:
    """Return the coverage `_nhw` of the clutter: bits of arcs, straight to hooked, each cut by a disc about its middle.

    One formula for all, so that they are drawn at once.
    """
    c = chance.reshape(6, _FRAGMENTS, 1, 1).astype(np.float32)
    x, y = _grid(size)
    middle_x, middle_y, angle = c[0] * 2 - 1, c[1] * 2 - 1, c[2] * TURN
    radius, half_width, half_length = 0.15 + c[3], 0.05 + 0.07 * c[4], 0.15 + 0.2 * c[5]
    dx, dy = x - middle_x, y - middle_y
    band = np.abs(norm(dx - radius * np.cos(angle), dy - radius * np.sin(angle)) - radius) - half_width
    return _coverage(np.maximum(band, norm(dx, dy) - half_length), size)


def _palette(chance: NDArray[np.float64]) -> tuple[Field, Field, Field]:
    """Return colours of any hue, each as (3, 1, 1): two of the background, two of the fill, one of the plain clutter.

    The fill is lighter than the background, or darker if inverted. Its second tone is about half the
    spread from its first in each channel, so that the texture shows.
    """
    ground, (fill, step), (plain, _) = chance[:18].astype(np.float32).reshape(3, 2, 3, 1, 1)
    depth = np.float32(_tail(chance[18], *_DEPTH))
    fill = np.stack([fill, (fill + np.float32(0.35) + np.float32(0.3) * step) % 1])
    ground, fill = depth * ground, 1 - depth * fill
    return (1 - ground, 1 - fill, 1 - plain) if chance[19] < _INVERTED else (ground, fill, plain)


def _texture(chance: NDArray[np.float64], texture: int, size: int) -> Field:
    """Return the pattern in [0, 1], rotated by any angle, with 2.2 to 3.6 periods in half the image."""
    angle, periods, *shift = chance[:4].tolist()
    u, w = _rotate(*_grid(size), angle * 2 * np.pi)
    periods = np.float32(_between(periods, 2.2, 3.6))
    u, w = u * periods + np.float32(shift[0]), w * periods + np.float32(shift[1])
    return PATTERNS[TEXTURES[texture]](u, w, chance[4:].astype(np.float32))


def _swell(chance: NDArray[np.float64], size: int) -> Field:
    """Return two slow waves in [0, 1] that shade the background."""
    c = chance.astype(np.float32)
    x, y = _grid(size)
    slow = np.sin(x * (4 * c[0] - 2) + y * (4 * c[1] - 2) + c[2] * TURN)
    faster = np.sin(x * (12 * c[3] - 6) + y * (12 * c[4] - 6) + c[5] * TURN)
    swell: Field = 0.5 + 0.25 * (slow + faster)
    return swell


def draw(key: tuple[int, ...], shape: int, texture: int, size: int = 32) -> Image:
    """Return the image (size, size, 3) of a shape in a texture; everything else is random and depends on `key` alone.

    The same key with another shape, texture or size is the same scene with that one thing changed (but the
    noise, which is per pixel, changes with the size).
    """
    rng = generator(key)
    inside = _shape_mask(rng.random(16), shape, size)
    pattern = _texture(rng.random(68), texture, size)
    swell = _swell(rng.random(6), size)
    ground, fill, plain = _palette(rng.random(20))
    clutter_nhw = _fragments(rng.random(6 * _FRAGMENTS), size)
    level = np.float32(_tail(rng.random(), *_NOISE) * 6**0.5)

    # Clutter in a colour of its own lies behind; two bits wear the shape's own fill, so that colour and
    # texture do not segment it; and one gap passes over it, so that no single edge is to be relied on.
    image_chw = ground[0] + swell * (ground[1] - ground[0])
    image_chw += clutter_nhw[:3].max(0) * (plain - image_chw)
    filled = np.maximum(inside * (1 - clutter_nhw[3]), clutter_nhw[4:].max(0))
    image_chw += filled * (fill[0] + pattern * (fill[1] - fill[0]) - image_chw)
    noise = rng.random((2, 3, size, size), dtype=np.float32)
    image_chw += level * (noise[0] - noise[1])  # triangular: a difference of two uniforms has variance 1/6
    levels_chw = (np.clip(image_chw, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)
    return np.ascontiguousarray(levels_chw.transpose(1, 2, 0))
