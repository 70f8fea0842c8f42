"""The ten textures, as patterns in [0, 1].

Each takes a turned and shifted frame in periods, and 64 numbers in [0, 1] for those that need more chance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitclinic.data.shapes.outlines import TURN, Field, norm


def _two_tone(wave: Field) -> Field:
    """A wave in [-1, 1] to a soft two-tone pattern in [0, 1]: crisp, yet without aliasing at 32 pixels."""
    tone: Field = np.clip(wave * np.float32(1.2) + np.float32(0.5), 0, 1)
    return tone


def _blobs(u: Field, w: Field, chance: Field) -> Field:
    turn, phase = chance[:5, None, None] * TURN, chance[5:10, None, None] * TURN
    waves_nhw = np.sin((np.cos(turn) * u + np.sin(turn) * w) * np.float32(4) + phase)
    return _two_tone(waves_nhw.sum(0) * np.float32(0.6))


def _to_line(u: Field, w: Field) -> Field:
    """Distance to the nearest line of the integer grid."""
    nearest: Field = np.minimum(np.abs(u - np.rint(u)), np.abs(w - np.rint(w)))
    return nearest


def _mosaic(u: Field, w: Field, chance: Field) -> Field:
    cells = np.floor(u * 2).astype(np.intp) % 8 * 8 + np.floor(w * 2).astype(np.intp) % 8
    tone: Field = chance[cells]
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
