"""The pixels of an object as COCO writes them: polygons, or lengths of runs down the columns, as numbers or as text.

A pixel belongs to a polygon if its centre lies inside, by the even-odd rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.decoding import Size

Mask = NDArray[np.bool_]


def draw_outline(outline: Any, size: Size) -> Mask:
    """Return the pixels of an object, [height, width].

    Args:
        outline: `segmentation` of a COCO annotation: a list of polygons [x, y, x, y, ...], which are joined, or {size,
            counts}, with counts as numbers or as COCO's compressed text.
        size: Height and width of the image.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> draw_outline([[1, 0, 3, 0, 3, 2, 1, 2]], (3, 4)).astype(int)
        array([[0, 1, 1, 0],
               [0, 1, 1, 0],
               [0, 0, 0, 0]])
    """
    if isinstance(outline, dict):
        counts = outline["counts"]
        height, width = (int(side) for side in outline["size"])
        runs = read_counts(counts) if isinstance(counts, str | bytes) else [int(count) for count in counts]
        return decode_runs(runs, (height, width))
    if not isinstance(outline, Sequence) or isinstance(outline, str) or not outline:
        raise ValueError("a segmentation is a list of polygons, or {size, counts}")
    drawn = np.zeros(size, bool)
    for polygon in outline:
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
        if len(points) < 3 or not np.isfinite(points).all():
            raise ValueError("a polygon has at least three points")
        drawn |= _fill(points, size)
    if not drawn.any():  # thinner than a pixel, between the centres of two
        middle = np.concatenate([np.asarray(polygon, np.float64).reshape(-1, 2) for polygon in outline]).mean(0)
        column, row = (int(np.clip(at, 0, side - 1)) for at, side in zip(middle, (size[1], size[0]), strict=True))
        drawn[row, column] = True
    return drawn


def _fill(points: NDArray[np.float64], size: Size) -> Mask:
    """Return the pixels whose centres lie inside a polygon: to the right of an odd number of its edges."""
    crossings = np.zeros((size[0], size[1] + 1), np.int64)
    rows = np.arange(size[0]) + 0.5
    for (x, y), (next_x, next_y) in pairwise([*points, points[0]]):
        crossed = np.flatnonzero((y <= rows) != (next_y <= rows))
        if len(crossed):
            at = x + (rows[crossed] - y) * (next_x - x) / (next_y - y)
            np.add.at(crossings, (crossed, np.clip(np.ceil(at - 0.5), 0, size[1]).astype(np.int64)), 1)
    return np.asarray(np.cumsum(crossings, axis=1)[:, :-1] % 2 == 1)


def decode_runs(runs: Sequence[int], size: Size) -> Mask:
    """Return the pixels of runs: so many out, so many in, and so on, down one column after the other.

    Raises:
        ValueError: The runs are not as long as the image has pixels.
    """
    if any(run < 0 for run in runs) or sum(runs) != size[0] * size[1]:
        raise ValueError(f"the runs of a mask add up to {sum(runs)}, and the image has {size[0]} x {size[1]} pixels")
    inside = np.arange(len(runs)) % 2 == 1
    return np.asarray(np.repeat(inside, runs).reshape(size[1], size[0]).T)


def read_counts(text: str | bytes) -> list[int]:
    """Return the runs in COCO's compressed text: five bits a character; from the fourth on, less the run two before.

    Raises:
        ValueError: The text ends within a number, or has other characters.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text if isinstance(text, bytes) else text.encode():
        code = character - 48
        if not 0 <= code < 64:
            raise ValueError("the compressed mask has characters that do not belong there")
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:  # negative
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the compressed mask ends within a number")
    return runs
