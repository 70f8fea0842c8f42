"""Pixelation and JPEG: what image libraries do to one picture of 8 bits at a time, on the CPU.

torchvision writes and reads a JPEG faster than Pillow does, and with the same bytes. It has deprecated its functions:
where they are gone, Pillow it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torchvision.io
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic.data.corruptions.parameters import Setting
from vitclinic.data.decoding import as_image

Picture = NDArray[np.uint8]
"""[H, W, C]"""

encode_jpeg: Any = getattr(torchvision.io, "encode_jpeg", None)
decode_jpeg: Any = getattr(torchvision.io, "decode_jpeg", None)


def through_pictures(x_bchw: Tensor, corrupted: Callable[[Picture, Setting], Picture], setting: Setting) -> Tensor:
    """Every image as a picture, `corrupted`, and as values in [0, 1] again."""
    pictures = as_pictures(x_bchw.cpu())
    for picture in pictures:
        picture[:] = corrupted(picture, setting)
    return as_values(pictures).to(x_bchw.device)


def as_pictures(x_bchw: Tensor) -> Picture:
    """Brought to the nearest of 256 levels, [B, H, W, C]."""
    levels = (x_bchw * 255).round_().clamp_(0, 255).short().byte()  # twice as fast as bytes at once
    return torch.stack(levels.unbind(1), -1).numpy()  # twice as fast as a change of the memory format


def as_values(pictures_bhwc: Picture) -> Tensor:
    """In [0, 1], [B, C, H, W]."""
    return torch.stack(torch.from_numpy(pictures_bhwc).unbind(-1), 1).float().div_(255)


def pixelate(picture: Picture, setting: Setting) -> Picture:
    """Made smaller to a `share` of each side and back, by a box filter; to enlarge by it is to repeat pixels."""
    share = setting.parameters
    h, w, _ = picture.shape
    high, wide = int(h * share), int(w * share)
    small = _array(as_image(picture).resize((wide, high), Image.Resampling.BOX))
    return small.take(_repeated(wide, w), axis=1).take(_repeated(high, h), axis=0)


@lru_cache(maxsize=64)
def _repeated(size: int, larger: int) -> NDArray[np.int64]:
    """Of each of `larger` pixels the one of `size` that its middle lies in."""
    return ((np.arange(larger) + 0.5) * (size / larger)).astype(np.int64)


def jpeg_compression(picture: Picture, setting: Setting) -> Picture:
    """Through a JPEG of that quality, colours at half the resolution."""
    through = by_pillow if encode_jpeg is None else by_torchvision
    return through(picture, setting.parameters)


def by_torchvision(picture: Picture, quality: int) -> Picture:
    decoded: Tensor = decode_jpeg(encode_jpeg(torch.from_numpy(picture).permute(2, 0, 1), quality))
    return decoded.permute(1, 2, 0).numpy()


def by_pillow(picture: Picture, quality: int) -> Picture:
    file = io.BytesIO()
    as_image(picture).save(file, "JPEG", quality=quality)
    with Image.open(file, formats=("JPEG",)) as decoded:
        return _array(decoded)


def _array(image: Image.Image) -> Picture:
    pixels: Picture = np.asarray(image)
    return pixels.reshape(*pixels.shape[:2], -1)


PICTURES: dict[str, Callable[[Picture, Setting], Picture]] = {
    function.__name__: function for function in (pixelate, jpeg_compression)
}
