"""The part of a stored image that evaluation sees.

Images of more than `PHOTO_SIZE` pixels are taken for photographs: they are stored with a margin of 1/8 where
they are large enough, and evaluation sees the centre (the usual 0.875 crop). Small images are seen whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitclinic.data.decoding import Pixels, Size, as_image

PHOTO_SIZE = 64


def is_photo(size: Size) -> bool:
    return max(size) > PHOTO_SIZE


def framed_size(size: Size, shorter_side: float) -> Size:
    """The size to store images at, given the (median) shorter side of the originals."""
    with_margin = (round(size[0] * 8 / 7), round(size[1] * 8 / 7))
    return with_margin if is_photo(size) and shorter_side >= max(with_margin) else size


def centre_view(images: NDArray[np.uint8] | Sequence[Pixels], size: Size) -> NDArray[np.uint8]:
    """What evaluation sees of stored images (an array) or of originals (a list), [B, h, w, C]."""
    if not isinstance(images, np.ndarray):
        images = np.stack([_framed(image, size) for image in images])
    top, left = (images.shape[1] - size[0]) // 2, (images.shape[2] - size[1]) // 2
    return images[:, top : top + size[0], left : left + size[1]]


def _framed(image: Pixels, size: Size) -> Pixels:
    wanted = (round(size[0] * 8 / 7), round(size[1] * 8 / 7)) if is_photo(size) else size
    if image.shape[:2] == wanted:
        return image
    view = as_image(image)
    fitted = ImageOps.fit(view, (wanted[1], wanted[0]), Image.Resampling.BICUBIC)
    return np.asarray(fitted).reshape(*wanted, image.shape[2])
