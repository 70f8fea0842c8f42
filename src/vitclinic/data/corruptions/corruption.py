"""`Corruption`: any of the nineteen at any severity, on a batch of images; and JPEG, which image libraries do.

JPEG is written and read one picture of 8 bits at a time, on the CPU. torchvision writes and reads a JPEG faster than
Pillow does, and with the same bytes. It has deprecated its functions: where they are gone, Pillow it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torchvision.io
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic._core.errors import DataError
from vitclinic.data.corruptions.blur import (
    defocus_blur,
    floor_to_level,
    gaussian_blur,
    glass_blur,
    motion_blur,
    round_to_level,
    zoom_blur,
)
from vitclinic.data.corruptions.digital import brightness, contrast, elastic_transform, pixelate, saturate
from vitclinic.data.corruptions.noise import Draws, gaussian_noise, impulse_noise, shot_noise, speckle_noise
from vitclinic.data.corruptions.parameters import Setting, check_corruption, setting
from vitclinic.data.corruptions.weather import fog, frost, snow, spatter
from vitclinic.data.decoding import as_image
from vitclinic.data.stream import Batch

Picture = NDArray[np.uint8]
"""[H, W, C]"""

encode_jpeg: Any = getattr(torchvision.io, "encode_jpeg", None)
decode_jpeg: Any = getattr(torchvision.io, "decode_jpeg", None)

_FUNCTIONS: dict[str, Callable[[Tensor, Setting, Draws], Tensor]] = {
    function.__name__: function
    for function in (
        *(gaussian_noise, shot_noise, impulse_noise, speckle_noise),
        *(defocus_blur, glass_blur, motion_blur, zoom_blur, gaussian_blur),
        *(snow, frost, fog, brightness, contrast, saturate, spatter),
        *(elastic_transform, pixelate),
    )
}

_ON_LEVELS = frozenset({"motion_blur", "pixelate"})
"""Corruptions whose results already have 256 levels."""

_BESIDE = 0.5
"""Distance from [0, 1] within which values are clipped, as interpolation causes them; images in 0..255 or normalized
ones lie farther out and are an error."""

_AT_ONCE, _ON_GPU = 2**19, 2**26
"""Values that are corrupted at a time: few enough to stay in a CPU's cache and in memory that is already mapped
(otherwise page faults take as long as the work)."""


class Corruption:
    """One corruption at one severity, as a function of images.

    The randomness of an image derives from (seed, name, severity, its index): the same image gets the same corruption
    whatever else is in the batch. As in the published sets, images have 256 levels: inputs are rounded to them, and the
    result is truncated to the next lower level. Shapes: [B, C, H, W] in [0, 1], with C 1 or 3, H and W at least 32;
    dtype and device are kept.

    Args:
        name: One of the nineteen corruptions, such as `fog`.
        severity: 1 to 5.
        seed: Seed of the random corruptions.

    Raises:
        RecipeError: The name or the severity does not exist.

    Example:
        >>> images = torch.rand(2, 3, 32, 32)
        >>> fog = Corruption("fog", severity=3)
        >>> torch.equal(fog(images, [7, 8])[1:], fog(images[1:], [8]))
        True

    Reference:
        Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", 2019.
    """

    def __init__(self, name: str, severity: int, seed: int = 0) -> None:
        check_corruption(name, severity)
        self.name, self.severity, self.seed = name, int(severity), seed  # of 3.0 the same random numbers as of 3

    @torch.no_grad()
    def __call__(self, images: Tensor, indices: Sequence[int] | NDArray[np.int64] | Tensor) -> Tensor:
        """Return the corrupted images.

        Args:
            images: [B, C, H, W] in [0, 1].
            indices: The index of each image in its data set, which determines its random numbers.

        Raises:
            DataError: The images have a wrong shape, dtype, range or size, or there is not one index per image.
        """
        if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
            got = f"{images.dtype}, {tuple(images.shape)}"
            raise DataError(f"Corruptions need floating-point images [B, 1 or 3, H, W] (got {got}).")
        if len(indices) != len(images):
            raise DataError(f"Got {len(images)} images and {len(indices)} indices; pass one index per image.")
        chosen = setting(self.name, self.severity, (images.shape[2], images.shape[3]))
        if not len(images):
            return images.clone()
        least, most = (float(end) for end in images.aminmax())
        if not (least >= -_BESIDE and most <= 1 + _BESIDE):
            raise DataError(f"Corruptions need images in [0, 1] (got values from {least:g} to {most:g}).")
        if self.name == "jpeg_compression":  # has no use for random numbers, nor for parts
            return jpeg_compression(images.detach().float(), chosen).to(images.dtype)
        rows = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices, dtype=np.int64)
        result = torch.empty_like(images)
        count = (_AT_ONCE if images.device.type == "cpu" else _ON_GPU) // images[0].numel()
        threads = torch.get_num_threads()
        count = max(threads, count // threads * threads)  # where each has a thread, none has more than the others
        for start in range(0, len(images), count):
            part = slice(start, start + count)
            result[part] = self._corrupt_part(images[part], rows[part], chosen)
        return result

    def _corrupt_part(self, images: Tensor, rows: NDArray[np.int64], chosen: Setting) -> Tensor:
        draws = Draws(f"{self.name} {self.severity}", self.seed, rows, images.device)
        corrupted = _FUNCTIONS[self.name](round_to_level(images.detach().float()), chosen, draws)
        return corrupted if self.name in _ON_LEVELS else floor_to_level(corrupted)

    def batch(self, batch: Batch) -> Batch:
        """Return the batch with its images corrupted, each according to its index."""
        return replace(batch, images=self(batch.images, batch.indices))


def corrupt(
    images: Tensor, name: str, severity: int, indices: Sequence[int] | Tensor | None = None, seed: int = 0
) -> Tensor:
    """Return the images corrupted; image i of the batch is image i of the set unless `indices` are given."""
    return Corruption(name, severity, seed)(images, range(len(images)) if indices is None else indices)


def jpeg_compression(x_bchw: Tensor, setting: Setting) -> Tensor:
    """Compress to a JPEG of that quality, with chroma at half the resolution, and decode it."""
    through = by_pillow if encode_jpeg is None else by_torchvision
    pictures = as_pictures(x_bchw.cpu())
    for picture in pictures:
        picture[:] = through(picture, setting.parameters)
    return as_values(pictures).to(x_bchw.device)


def as_pictures(x_bchw: Tensor) -> Picture:
    """Round to the nearest of 256 levels, [B, H, W, C]."""
    levels = (x_bchw * 255).round_().clamp_(0, 255).short().byte()  # twice as fast as bytes at once
    return torch.stack(levels.unbind(1), -1).numpy()  # twice as fast as a change of the memory format


def as_values(pictures_bhwc: Picture) -> Tensor:
    """Convert pictures to [0, 1], [B, C, H, W]."""
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
