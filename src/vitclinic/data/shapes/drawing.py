"""Drawing of a shape in a texture: outline, colours, clutter and noise, all from one key.

Coordinates: an image is [-1, 1]^2 with y upwards. Images are drawn many at a time: a `Field` is [B, size, size] unless
its name says otherwise; `_bchw` has an axis of colours, `_bnhw` one of clutter fragments. An image does not depend on
those that are drawn with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.shapes.outlines import CLASSES, OUTLINES, PATTERNS, TEXTURES, TURN, Field, norm

Image = NDArray[np.uint8]
Numbers = NDArray[np.float64]
Labels = NDArray[np.int64]

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


def _tail(chance: Numbers, low: float, high: float) -> list[float]:
    """Return numbers from low to high, mostly near low."""
    # In Python: numpy's powers may differ in the last bit, and drawings are to stay as they are.
    return [low + one**2 * (high - low) for one in chance.tolist()]


def _both(chance: Numbers, limit: float) -> list[float]:
    """Return numbers from -limit to limit, mostly near 0."""
    return [limit * (2 * one - 1) ** 3 for one in chance.tolist()]


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[Field, Field]:
    """Return x [1, size] and y [size, 1] of the pixel centres."""
    centres = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    return centres[None], -centres[:, None]


def _between(chance: Numbers, low: float, high: float) -> Numbers:
    return low + chance * (high - low)


def _column(values: Numbers | list[float]) -> Field:
    """Return one number an image as float32 [B, 1, 1]."""
    return np.asarray(values, dtype=np.float32).reshape(-1, 1, 1)


def _rotate(x: Field, y: Field, angle: Numbers) -> tuple[Field, Field]:
    c, s = _column(np.cos(angle)), _column(np.sin(angle))
    return c * x + s * y, c * y - s * x


def _coverage(distance: Field, size: int) -> Field:
    """Return the share of each pixel inside, from the signed distance in image units; exact for an upright edge."""
    share: Field = np.clip(np.float32(0.5) - distance * np.float32(size / 2), 0, 1)
    return share


def mask(key: tuple[int, ...], shape: int, size: int = 32) -> Field:
    """Return the coverage in [0, 1] of the shape that `draw` draws for this key: ground truth for segmentation."""
    found: Field = _shape_masks(generator(key).random((1, 16)), np.array([shape]), size)[0]
    return found


def generator(key: tuple[int, ...]) -> np.random.Generator:
    """Return the random generator of a key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def _shape_masks(chance: Numbers, shapes: Labels, size: int) -> Field:
    c = chance.T
    scale, stretch = _between(c[0], *_SCALE), np.exp(_between(c[1], -_STRETCH, _STRETCH) / 2)
    x, y = _grid(size)
    x, y = x - _column(_both(c[2], _SHIFT)), y - _column(_both(c[3], _SHIFT))
    x, y = _rotate(x, y, np.array(_both(c[4], _TILT)))
    x, y = x / _column(scale * stretch), y * _column(stretch / scale)
    wobble, phase = _column(_WOBBLE * c[5]), _column(c[6] * 2 * np.pi)
    x, y = x + wobble * np.sin(3 * y + phase), y + wobble * np.sin(3 * x - phase)
    x = np.where((c[7] < 0.5)[:, None, None], -x, x)  # mirrored: matters to the crescent and the spiral
    distance = np.empty_like(x)
    for shape in np.unique(shapes):
        rows = shapes == shape
        distance[rows] = OUTLINES[CLASSES[shape]](x[rows], y[rows], c[8][rows, None, None])
    return _coverage(distance * _column(scale), size)


def _fragments(chance: Numbers, size: int) -> Field:
    """Return the coverage `_bnhw` of the clutter: bits of arcs, straight to hooked, each cut by a disc at its middle.

    One formula for all, so that they are drawn at once.
    """
    c = chance.reshape(-1, 6, _FRAGMENTS, 1, 1).astype(np.float32).swapaxes(0, 1)
    x, y = _grid(size)
    middle_x, middle_y, angle = c[0] * 2 - 1, c[1] * 2 - 1, c[2] * TURN
    radius, half_width, half_length = 0.15 + c[3], 0.05 + 0.07 * c[4], 0.15 + 0.2 * c[5]
    dx, dy = x - middle_x, y - middle_y
    band = np.abs(norm(dx - radius * np.cos(angle), dy - radius * np.sin(angle)) - radius) - half_width
    return _coverage(np.maximum(band, norm(dx, dy) - half_length), size)


def _palettes(chance: Numbers) -> tuple[Field, Field, Field]:
    """Return colours of any hue: two of the background and two of the fill, [2, B, 3, 1, 1], one of the plain clutter.

    The fill is lighter than the background, or darker if inverted. Its second tone is about half the
    spread from its first in each channel, so that the texture shows.
    """
    colours = chance[:, :18].astype(np.float32).reshape(-1, 3, 2, 3, 1, 1)
    ground, (fill, step), (plain, _) = colours.transpose(1, 2, 0, 3, 4, 5)
    depth = _column(_tail(chance[:, 18], *_DEPTH))[..., None]
    fill = np.stack([fill, (fill + np.float32(0.35) + np.float32(0.3) * step) % 1])
    ground, fill = depth * ground, 1 - depth * fill
    inverted = (chance[:, 19] < _INVERTED)[:, None, None, None]
    ground, fill, plain = (np.where(inverted, 1 - colour, colour) for colour in (ground, fill, plain))
    return ground, fill, plain


def _textures(chance: Numbers, textures: Labels, size: int) -> Field:
    """Return the patterns in [0, 1], each rotated by any angle, with 2.2 to 3.6 periods in half the image."""
    angle, periods, shift_u, shift_w = chance[:, :4].T
    u, w = _rotate(*_grid(size), angle * 2 * np.pi)
    scale = _column(_between(periods, 2.2, 3.6))
    u, w = u * scale + _column(shift_u), w * scale + _column(shift_w)
    pattern, rest = np.empty_like(u), chance[:, 4:].astype(np.float32)
    for texture in np.unique(textures):
        rows = textures == texture
        pattern[rows] = PATTERNS[TEXTURES[texture]](u[rows], w[rows], rest[rows])
    return pattern


def _swells(chance: Numbers, size: int) -> Field:
    """Return two slow waves in [0, 1] that shade the background."""
    c = chance.astype(np.float32).T[..., None, None]
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
    image: Image = draw_many([key], [shape], [texture], size)[0]
    return image


def draw_many(
    keys: Sequence[tuple[int, ...]], shapes: Sequence[int], textures: Sequence[int], size: int = 32
) -> NDArray[np.uint8]:
    """Return what `draw` returns for each key, shape and texture, [B, size, size, 3], in about half the time."""
    random = [generator(key) for key in keys]
    chance = np.stack([one.random(147) for one in random])
    inside = _shape_masks(chance[:, :16], np.asarray(shapes), size)
    pattern = _textures(chance[:, 16:84], np.asarray(textures), size)[:, None]
    swell = _swells(chance[:, 84:90], size)[:, None]
    ground, fill, plain = _palettes(chance[:, 90:110])
    clutter_bnhw = _fragments(chance[:, 110:146], size)
    level = _column([tail * 6**0.5 for tail in _tail(chance[:, 146], *_NOISE)])[..., None]

    # Clutter in a colour of its own lies behind; two bits wear the shape's own fill, so that colour and
    # texture do not segment it; and one gap passes over it, so that no single edge is to be relied on.
    image_bchw = ground[0] + swell * (ground[1] - ground[0])
    image_bchw += clutter_bnhw[:, :3].max(1, keepdims=True) * (plain - image_bchw)
    filled = np.maximum(inside * (1 - clutter_bnhw[:, 3]), clutter_bnhw[:, 4:].max(1))[:, None]
    image_bchw += filled * (fill[0] + pattern * (fill[1] - fill[0]) - image_bchw)
    noise = np.stack([one.random((2, 3, size, size), dtype=np.float32) for one in random])
    image_bchw += level * (noise[:, 0] - noise[:, 1])  # triangular: a difference of two uniforms has variance 1/6
    levels_bchw = (np.clip(image_bchw, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)
    return np.ascontiguousarray(levels_bchw.transpose(0, 2, 3, 1))


VERSION = 1
"""Version of the drawing code: a new one invalidates every stored set and changes every digest."""
