"""The part of a stored image that evaluation sees.

Images of more than `PHOTO_SIZE` pixels are taken for photographs: they are stored with a margin of 1/8 where
they are large enough, and evaluation sees the centre (the usual 0.875 crop). Small images are seen whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitclinic.data.decoding import Pixels, Size, as_image

PHOTO_SIZE = 64


class Originals(Protocol):
    """Images at their own sizes, to be looked at one by one; `framed` is the size at which evaluation fits them."""

    framed: Size

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Pixels]: ...


Images = NDArray[np.uint8] | Originals
"""Stored images of one size, [B, H, W, C], or originals."""


def is_photo(size: Size) -> bool:
    return max(size) > PHOTO_SIZE


def framed_size(size: Size, shorter_side: float) -> Size:
    """The size to store images at, given the (median) shorter side of the originals."""
    with_margin = (round(size[0] * 8 / 7), round(size[1] * 8 / 7))
    return with_margin if is_photo(size) and shorter_side >= max(with_margin) else size


def centre_view(images: Images, size: Size) -> NDArray[np.uint8]:
    """What evaluation sees of images, [B, h, w, C]."""
    if not isinstance(images, np.ndarray):
        images = np.stack([_fitted(image, images.framed) for image in images])
    top, left = (images.shape[1] - size[0]) // 2, (images.shape[2] - size[1]) // 2
    return images[:, top : top + size[0], left : left + size[1]]


def _fitted(image: Pixels, size: Size) -> Pixels:
    if image.shape[:2] == size:
        return image
    fitted = ImageOps.fit(as_image(image), (size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(fitted).reshape(*size, image.shape[2])
