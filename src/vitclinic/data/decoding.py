"""From an image file of any kind to 8-bit pixels of the size a network takes.

Conversions: EXIF orientation is applied; 16-bit greys are scaled to 8 bits; CMYK, palette and other colour
modes become RGB; transparent pixels are laid over white; of an animation the first frame counts.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitclinic.errors import DataError

Pixels = NDArray[np.uint8]
"""One image, [height, width, channels]."""

Size = tuple[int, int]
"""(height, width)."""

UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
"""What Pillow raises for files that are not images, are cut off, or would not fit into memory."""

# Pillow warns above 89 million pixels and refuses above 179 million: the first are only large photographs.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}


def is_grey(image: Image.Image) -> bool:
    return image.mode in _GREY_MODES


def pixels(image: Image.Image, channels: int) -> Pixels:
    """The decoded image as uint8, [height, width, channels] with 1 (grey) or 3 (RGB) channels."""
    return with_channels(_upright(image), channels)


def fitted(image: Image.Image, channels: int, size: Size) -> Pixels:
    """As `pixels`, resized to cover `size` and cropped to it at the centre."""
    if image.format == "JPEG":  # decodes at 1/2, 1/4 or 1/8 where that is still large enough
        image.draft(None, (size[1] * 2, size[0] * 2))
    upright = as_image(with_channels(_upright(image), channels))
    if upright.size != (size[1], size[0]):
        upright = ImageOps.fit(upright, (size[1], size[0]), Image.Resampling.BICUBIC)
    return with_channels(upright, channels)


def as_image(array: Pixels) -> Image.Image:
    """Decoded pixels as a Pillow image again, grey or RGB."""
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image)


def with_channels(image: Image.Image, channels: int) -> Pixels:
    """The image, as it lies, as uint8 [height, width, channels]."""
    if image.mode == "F":
        raise DataError("floating-point pixels have no agreed range: save the image with 8 or 16 bits")
    if image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image), sixteen=image.mode.startswith("I;16")))
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    array = np.array(image.convert("L" if channels == 1 else "RGB"))
    return array[:, :, None] if array.ndim == 2 else array


def _eight_bits(values: NDArray[np.generic], sixteen: bool) -> Pixels:
    """16-bit values scaled to 0..255; of a 32-bit image without values beyond 8 bits, the values themselves."""
    wide = np.asarray(values, dtype=np.int64)
    low, high = int(wide.min()), int(wide.max())
    if low < 0 or high > 65535:
        raise DataError("pixel values lie outside 0..65535: save the image with 8 or 16 bits")
    return (np.rint(wide / 257) if sixteen or high > 255 else wide).astype(np.uint8)
