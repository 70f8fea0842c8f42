"""The outlines and the textures of the ten shape classes.

An outline is a signed distance, negative inside. It takes the unit frames of some images and v in [0, 1] of each, which
varies the proportions within the class; the distance is exact near the edges, where anti-aliasing needs it. A texture
is a pattern in [0, 1] over the planes (u, w), with random numbers `chance` for those that need some.

Shapes: a `Field` is [B, size, size], v is float64 [B, 1, 1], `chance` [B, 64]. What depends on v alone is computed in
float64 and rounded once, as for a single image.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float32]
Proportion = NDArray[np.float64]
TURN = np.float32(2 * np.pi)


def _round(values: Proportion) -> Field:
    return values.astype(np.float32)


def norm(x: Field, y: Field) -> Field:
    """Return the Euclidean norm of (x, y)."""
    norm: Field = np.sqrt(x * x + y * y)  # several times faster than np.hypot, and nothing here overflows
    return norm


def _star_polygon(x: Field, y: Field, points: int, inner: Field | np.float32) -> Field:
    """Return the distance to a star: tips at radius 1, the first one up, notches at radius `inner`."""
    half = np.float32(np.pi / points)
    angle = np.abs((np.arctan2(x, y) + half) % (2 * half) - half)
    radius = norm(x, y)
    edge_x, edge_y = inner * np.cos(half) - 1, inner * np.sin(half)
    length = np.hypot(edge_x, edge_y)
    normal_x, normal_y = edge_y / length, -edge_x / length
    distance: Field = (radius * np.cos(angle) - 1) * normal_x + radius * np.sin(angle) * normal_y
    return distance


def _box(x: Field, y: Field, half_width: Field | float, half_height: Field | float) -> Field:
    distance: Field = np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)
    return distance


def _disc(x: Field, y: Field, v: Proportion) -> Field:
    return norm(x, y) - 0.85


def _ring(x: Field, y: Field, v: Proportion) -> Field:
    hole = 0.3 + 0.3 * v
    distance: Field = np.abs(norm(x, y) - _round((0.9 + hole) / 2)) - _round((0.9 - hole) / 2)
    return distance


def _square(x: Field, y: Field, v: Proportion) -> Field:
    return _box(x, y, 0.75, 0.75)


def _triangle(x: Field, y: Field, v: Proportion) -> Field:
    return _star_polygon(x, y + 0.2, 3, np.float32(0.5)) - 0.1


def _star(x: Field, y: Field, v: Proportion) -> Field:
    return _star_polygon(x, y, 5, _round(0.4 + 0.15 * v)) - 0.05


def _cross(x: Field, y: Field, v: Proportion) -> Field:
    arm = _round(0.22 + 0.16 * v)
    distance: Field = np.minimum(_box(x, y, arm, 0.9), _box(x, y, 0.9, arm))
    return distance


def _crescent(x: Field, y: Field, v: Proportion) -> Field:
    distance: Field = np.maximum(norm(x, y) - 0.9, 0.75 - norm(x - _round(0.4 + 0.2 * v), y))
    return distance


def _heart(x: Field, y: Field, v: Proportion) -> Field:
    """Return the distance to a heart: a square on its corner, with a disc on each of its upper sides."""
    h = np.float32(0.82)
    x, y = np.abs(x), y + 0.1
    square = (x + np.abs(y) - h) * np.float32(0.5**0.5)
    distance: Field = np.minimum(square, norm(x - h / 2, y - h / 2) - h * np.float32(0.5**0.5))
    return distance


def _arrow(x: Field, y: Field, v: Proportion) -> Field:
    shaft, width = _round(0.18 + 0.14 * v), 0.78
    slope = np.float32(1 / np.hypot(0.9, width))
    head = np.maximum((np.abs(x) * 0.9 + (y - 0.95) * width) * slope, 0.05 - y)
    distance: Field = np.minimum(head, _box(x, y + 0.4, shaft, 0.55))
    return distance


def _spiral(x: Field, y: Field, v: Proportion) -> Field:
    """Return the distance to a band along Archimedes' spiral r = g t over two turns t."""
    radius = norm(x, y)
    angle: Field = np.arctan2(y, x)
    turn = angle / TURN + np.float32(0.5)
    whole: Field = np.rint(radius / 0.46 - turn)
    off_band: Field = np.abs(radius - 0.46 * (np.clip(whole, 0, 1) + turn))
    return off_band - _round(0.11 + 0.05 * v)


OUTLINES: dict[str, Callable[[Field, Field, Proportion], Field]] = {
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
CLASSES: tuple[str, ...] = tuple(OUTLINES)


def _two_tone(wave: Field) -> Field:
    """Turn a wave in [-1, 1] into a soft two-tone pattern in [0, 1]: crisp, yet without aliasing at 32 pixels."""
    tone: Field = np.clip(wave * np.float32(1.2) + np.float32(0.5), 0, 1)
    return tone


def _blobs(u: Field, w: Field, chance: Field) -> Field:
    turn, phase = chance[:, :5, None, None] * TURN, chance[:, 5:10, None, None] * TURN
    waves_bnhw = np.sin((np.cos(turn) * u[:, None] + np.sin(turn) * w[:, None]) * np.float32(4) + phase)
    return _two_tone(waves_bnhw.sum(1) * np.float32(0.6))


def _to_line(u: Field, w: Field) -> Field:
    """Return the distance to the nearest line of the integer grid."""
    nearest: Field = np.minimum(np.abs(u - np.rint(u)), np.abs(w - np.rint(w)))
    return nearest


def _mosaic(u: Field, w: Field, chance: Field) -> Field:
    cells = np.floor(u * 2).astype(np.intp) % 8 * 8 + np.floor(w * 2).astype(np.intp) % 8
    tone: Field = np.take_along_axis(chance, cells.reshape(len(cells), -1), axis=1).reshape(cells.shape)
    return tone


PATTERNS: dict[str, Callable[[Field, Field, Field], Field]] = {
    "stripes": lambda u, w, chance: _two_tone(np.sin(u * TURN)),
    "checks": lambda u, w, chance: _two_tone(3 * np.sin(u * TURN / 2) * np.sin(w * TURN / 2)),
    "dots": lambda u, w, chance: _two_tone(np.cos(u * TURN) + np.cos(w * TURN) - np.float32(0.5)),
    "waves": lambda u, w, chance: _two_tone(np.sin(u * TURN + 2 * np.sin(w * TURN / 2))),
    "rings": lambda u, w, chance: _two_tone(np.sin(norm(u, w) * TURN)),
    "gradient": lambda u, w, chance: np.clip(u / 4 + np.float32(0.5), 0, 1),
    "blobs": _blobs,
    "mosaic": _mosaic,
    "net": lambda u, w, chance: _two_tone(3 * np.cos(_to_line(u, w) * TURN) - np.float32(2.2)),
    "rays": lambda u, w, chance: _two_tone(np.sin(np.arctan2(u, w) * 6)),
}
TEXTURES: tuple[str, ...] = tuple(PATTERNS)
