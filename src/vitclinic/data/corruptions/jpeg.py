"""JPEG: an image written and read again, colours at half the resolution.

torchvision does that faster than Pillow, and with the same bytes. It has deprecated its functions: where they are gone,
Pillow it is.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
import torchvision.io
from PIL import Image
from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.parameters import Setting
from vitclinic.data.decoding import as_image

encode_jpeg: Any = getattr(torchvision.io, "encode_jpeg", None)
decode_jpeg: Any = getattr(torchvision.io, "decode_jpeg", None)


def jpeg_compression(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Through a JPEG of that quality."""
    through = by_pillow if encode_jpeg is None else by_torchvision
    levels = (x_bchw * 255).round_().byte()
    # Colours last, as libjpeg takes them; stacking is three times faster than a change of the memory format.
    pixels = torch.stack(levels.unbind(1), -1).cpu().permute(0, 3, 1, 2)
    result = torch.empty_like(x_bchw)
    for image, target in zip(pixels, result, strict=True):
        target.copy_(through(image, setting.parameters))
    return result.div_(255)


def by_torchvision(pixels_chw: Tensor, quality: int) -> Tensor:
    decoded: Tensor = decode_jpeg(encode_jpeg(pixels_chw, quality))
    return decoded


def by_pillow(pixels_chw: Tensor, quality: int) -> Tensor:
    file = io.BytesIO()
    as_image(pixels_chw.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    with Image.open(file, formats=("JPEG",)) as decoded:
        pixels = np.array(decoded).reshape(*pixels_chw.shape[1:], -1)
    return torch.from_numpy(pixels).permute(2, 0, 1)
