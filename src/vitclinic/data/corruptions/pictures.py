"""JPEG: what an image library does to one picture of 8 bits at a time, on the CPU.

torchvision writes and reads a JPEG faster than Pillow does, and with the same bytes. It has deprecated its functions:
where they are gone, Pillow it is.
"""

from __future__ import annotations

import io
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


def jpeg_compression(x_bchw: Tensor, setting: Setting) -> Tensor:
    """Through a JPEG of that quality, colours at half the resolution."""
    through = by_pillow if encode_jpeg is None else by_torchvision
    pictures = as_pictures(x_bchw.cpu())
    for picture in pictures:
        picture[:] = through(picture, setting.parameters)
    return as_values(pictures).to(x_bchw.device)


def as_pictures(x_bchw: Tensor) -> Picture:
    """Brought to the nearest of 256 levels, [B, H, W, C]."""
    levels = (x_bchw * 255).round_().clamp_(0, 255).short().byte()  # twice as fast as bytes at once
    return torch.stack(levels.unbind(1), -1).numpy()  # twice as fast as a change of the memory format


def as_values(pictures_bhwc: Picture) -> Tensor:
    """In [0, 1], [B, C, H, W]."""
    return torch.stack(torch.from_numpy(pictures_bhwc).unbind(-1), 1).float().div_(255)


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
