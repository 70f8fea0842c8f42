"""Decoding: from an image file of any kind to 8-bit pixels of the size that a network takes.

Conversions: EXIF orientation is applied; 16-bit greys are scaled to 8 bits; CMYK, palette and other colour
modes become RGB; transparent pixels are composited over white; of an animation the first frame is used.

Framing: photographs are stored a seventh larger than the network's input, so that training can crop them; evaluation
uses the centre.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from vitclinic._core.errors import DataError

Pixels = NDArray[np.uint8]
"""One image, [height, width, channels]."""

Size = tuple[int, int]
"""(height, width)."""

UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, TypeError, struct.error, Image.DecompressionBombError)
"""Exceptions that Pillow raises for files that are not images, are truncated, or would not fit into memory; a TypeError
is that of a TIFF whose fields are of other types than they should be."""

# Pillow warns above 89 million pixels and refuses above 179 million: the first are only large photographs.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}


def is_grey(image: Image.Image) -> bool:
    """Return True if an image has no colours, according to its mode."""
    return image.mode in _GREY_MODES


def pixels(image: Image.Image, channels: int) -> Pixels:
    """Return the decoded image as uint8, [height, width, channels] with 1 (grey) or 3 (RGB) channels."""
    return with_channels(_upright(image), channels)


def decode_and_fit(image: Image.Image, channels: int, size: Size) -> Pixels:
    """Decode as `pixels` does, resize to cover `size` and crop to it at the centre."""
    if image.format == "JPEG":  # decodes at 1/2, 1/4 or 1/8 where that is still large enough
        image.draft(None, (size[1] * 2, size[0] * 2))
    upright = with_channels(_upright(image), channels)
    return _fit(upright, size)


def as_image(array: Pixels) -> Image.Image:
    """Return decoded pixels as a Pillow image again, grey or RGB."""
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _upright(image: Image.Image) -> Image.Image:
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    return ImageOps.exif_transpose(image) if turned else image  # Pillow's copies an upright one, too


def with_channels(image: Image.Image, channels: int) -> Pixels:
    """Return the image, without rotating it, as uint8 [height, width, channels]."""
    if image.mode == "F":
        raise DataError("floating-point pixels have no defined range: save the image with 8 or 16 bits")
    if image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image), sixteen=image.mode.startswith("I;16")))
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    mode = "L" if channels == 1 else "RGB"
    array = np.array(image if image.mode == mode else image.convert(mode))
    return array[:, :, None] if array.ndim == 2 else array


def _eight_bits(values: NDArray[np.generic], sixteen: bool) -> Pixels:
    """Scale 16-bit values to 0..255; a 32-bit image whose values fit into 8 bits is returned as it is."""
    wide = np.asarray(values, dtype=np.int64)
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 65535:
        raise DataError("pixel values lie outside 0..65535: save the image with 8 or 16 bits")
    return (np.rint(wide / 257) if sixteen or high > 255 else wide).astype(np.uint8)


PHOTO_SIZE = 64
"""Images with a longer side than this count as photographs."""


class Originals(Protocol):
    """Images at their original sizes, decoded one by one; evaluation fits them to the size `framed`."""

    framed: Size

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Pixels]: ...


Images = NDArray[np.uint8] | Originals
"""Stored images of one size, [B, H, W, C], or originals."""


def is_photo(size: Size) -> bool:
    """Return True if images of this size count as photographs."""
    return max(size) > PHOTO_SIZE


def storage_size(size: Size, shorter_side: float) -> Size:
    """Return the size to store images at, given the (median) shorter side of the originals."""
    with_margin = (round(size[0] * 8 / 7), round(size[1] * 8 / 7))
    return with_margin if is_photo(size) and shorter_side >= max(with_margin) else size


def centre_view(images: Images, size: Size) -> NDArray[np.uint8]:
    """Return the centre of the images, [B, h, w, C], which is the part that evaluation uses."""
    if not isinstance(images, np.ndarray):
        images = np.stack([_fit(image, images.framed) for image in images])
    top, left = (images.shape[1] - size[0]) // 2, (images.shape[2] - size[1]) // 2
    return images[:, top : top + size[0], left : left + size[1]]


def centre_boxes(images: Images, size: Size) -> NDArray[np.float64]:
    """Return what `centre_view` shows of the images: left, top, right, bottom as shares of width and height, [B, 4]."""
    whole = isinstance(images, np.ndarray)
    framed = images.shape[1:3] if isinstance(images, np.ndarray) else images.framed
    boxes = []
    for shape in [framed] * len(images) if whole else [image.shape for image in images]:
        scale = max(framed[0] / shape[0], framed[1] / shape[1])  # to cover `framed`
        shares = [size[axis] / (scale * shape[axis]) for axis in (1, 0)]
        boxes.append([(1 - share) / 2 for share in shares] + [(1 + share) / 2 for share in shares])
    return np.array(boxes)


def _fit(image: Pixels, size: Size) -> Pixels:
    """Resize pixels to cover `size`, and crop them to it at the centre."""
    if image.shape[:2] == size:
        return image
    fitted = ImageOps.fit(as_image(image), (size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(fitted).reshape(*size, image.shape[2])


@dataclass(frozen=True)
class Preprocessing:
    """The way from an image file to the pixels that a network was evaluated on: decode, resize, crop at the centre.

    Example:
        >>> small = Preprocessing(size=(8, 8), framed=(8, 8), channels=1)
        >>> small(Image.new("RGB", (20, 30))).shape
        (8, 8, 1)
    """

    size: Size
    """What the network takes."""
    framed: Size
    """What an image is resized to cover, before its centre is taken."""
    channels: int
    whole: bool = False
    """Decode JPEG files at full size, as for data too large to be cached, instead of at 1/2, 1/4 or 1/8."""

    def __call__(self, image: Image.Image) -> Pixels:
        """Return the pixels of an image, uint8 [height, width, channels].

        Raises:
            DataError: The pixels have no defined range.
            OSError: The file is truncated, or not an image; Pillow has other exceptions for it, all in `UNREADABLE`.
        """
        if self.whole:
            framed = _fit(pixels(image, self.channels), self.framed)
        else:
            framed = decode_and_fit(image, self.channels, self.framed)
        return np.ascontiguousarray(centre_view(framed[None], self.size)[0])
