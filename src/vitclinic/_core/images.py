"""Pictures as byte arrays: an image with coloured maps over it, and its PNG file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Picture = NDArray[np.uint8]

_COLOURS = np.array([(0, 0, 20), (80, 20, 110), (190, 55, 85), (250, 145, 10), (255, 255, 165)], dtype=np.float64)
"""From nothing to the maximum: dark blue, violet, red, orange, light yellow; lightness grows all along."""
_SHARE = 0.6
"""Share of the map's colours in the blend; the grey image has the rest."""
_SIDE = 224
"""Smaller pictures are enlarged to at least this many pixels: a 32 x 32 map is too small to see."""


def blend(image: Picture, attention: NDArray[np.floating], scale: tuple[float, float] | None = None) -> Picture:
    """Return `image` [H, W] or [H, W, C] in grey under the colours of `attention` [H, W], as [H, W, 3].

    Colours span the map's range from minimum to maximum; a constant map gets the darkest. With a `scale`, which several
    maps may share, they span that, and what is below it stays grey.
    """
    grey = _grey(image)
    if grey.shape != attention.shape:
        raise ValueError(f"an image of {grey.shape} pixels and a map of {attention.shape} must have the same size")
    low, high = scale or (float(attention.min()), float(attention.max()))
    level = (attention - low) / (high - low) if high > low else np.zeros(attention.shape)
    anchors = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack([np.interp(level, anchors, channel) for channel in _COLOURS.T], axis=-1)
    blended = _SHARE * colours + (1 - _SHARE) * grey[..., None]
    if scale is not None:
        blended = np.where((attention < low)[..., None], grey[..., None], blended)
    picture: Picture = np.rint(blended).astype(np.uint8)
    return picture


def beside(image: Picture, *maps: NDArray[np.floating], scale: tuple[float, float] | None = None) -> Picture:
    """Return the image with its blend with each map to its right, enlarged by an integer factor if small."""
    coloured = image if image.ndim == 3 and image.shape[2] == 3 else np.repeat(_grey(image)[..., None], 3, axis=2)
    row = np.concatenate([coloured.astype(np.uint8), *(blend(image, attention, scale) for attention in maps)], axis=1)
    factor = -(-_SIDE // min(image.shape[:2]))
    return row.repeat(factor, axis=0).repeat(factor, axis=1)


def tile(images: Picture, columns: int = 4, gap: int = 2, side: int = 64) -> Picture:
    """Return images [N, H, W, C] as one picture, in rows of `columns` with gaps between.

    Those smaller than `side` are enlarged by an integer factor, larger ones are sampled at an integer step.

    Example:
        >>> tile(np.zeros((6, 32, 32, 1), np.uint8)).shape
        (130, 262, 3)
    """
    coloured = images if images.shape[-1] == 3 else images[..., :1].repeat(3, axis=-1)
    least, step = min(images.shape[1:3]), max(1, min(images.shape[1:3]) // (2 * side))
    factor = max(1, -(-side // least))
    resized = coloured[:, ::step, ::step].repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, _ = resized.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    picture = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for place, image in enumerate(resized):
        top, left = place // columns * (height + gap), place % columns * (width + gap)
        picture[top : top + height, left : left + width] = image
    return picture


def png(picture: NDArray[Any]) -> bytes:
    """Return the picture as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_small(picture: NDArray[Any]) -> bytes:
    """Return a small picture as the content of a PNG or a JPEG file, whichever is smaller."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, format="JPEG", quality=85, optimize=True)
    return min(png(picture), buffer.getvalue(), key=len)


def _grey(image: Picture) -> NDArray[np.float64]:
    return image.astype(np.float64) if image.ndim == 2 else image.astype(np.float64).mean(-1)
