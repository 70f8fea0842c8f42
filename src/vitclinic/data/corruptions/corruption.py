"""`Corruption`: any of the nineteen at any severity, on a batch of images; and the digital ones.

These are brightness, contrast, saturation, pixelation, elastic deformation and JPEG. Value and saturation are those of
HSV: with hue and saturation kept, R, G and B are proportional to the value; with hue and value kept, their distances
from the value are proportional to the saturation. No conversion to HSV is needed.

JPEG is written and read one picture of 8 bits at a time, on the CPU. torchvision writes and reads a JPEG faster than
Pillow does, and with the same bytes. It has deprecated its functions: where they are gone, Pillow it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.io
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic._core.errors import DataError
from vitclinic.data.batch import Batch
from vitclinic.data.corruptions.blur import (
    defocus_blur,
    floor_to_level,
    gaussian_blur,
    gaussian_smooth,
    glass_blur,
    luma,
    motion_blur,
    round_to_level,
    zoom_blur,
)
from vitclinic.data.corruptions.noise import Draws, gaussian_noise, impulse_noise, shot_noise, speckle_noise
from vitclinic.data.corruptions.parameters import Setting, check_corruption, setting
from vitclinic.data.corruptions.weather import fog, frost, snow, spatter
from vitclinic.data.decoding import as_image


def brightness(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add `more` to the value (HSV); black becomes grey."""
    more = setting.parameters
    value = x_bchw.amax(1, keepdim=True)
    brighter = (value + more).clamp_(max=1)
    return torch.where(value > 0, x_bchw * (brighter / value), brighter)


def contrast(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Multiply the distance from the channel's mean by `share`."""
    share = setting.parameters
    means = x_bchw.mean(3, keepdim=True).double().mean(2, keepdim=True).float()  # long sums need the digits
    return (x_bchw - means).mul_(share).add_(means)


def saturate(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Multiply the saturation by `factor` and add `more`; pixels without a hue count as red. Grey images stay grey."""
    if x_bchw.shape[1] == 1:
        return luma(_scale_saturation(x_bchw.expand(-1, 3, -1, -1), *setting.parameters))
    return _scale_saturation(x_bchw, *setting.parameters)


def _scale_saturation(x_bchw: Tensor, factor: float, more: float) -> Tensor:
    value = x_bchw.amax(1, keepdim=True)
    distance = value - x_bchw.amin(1, keepdim=True)
    saturation = (distance / value.clamp(min=1e-6)).mul_(factor).add_(more).clamp_(max=1)
    share = (value * saturation).div_(distance.clamp(min=1e-6))
    coloured = value - (value - x_bchw).mul_(share)
    red = torch.cat([value, *[value - value * saturation] * 2], 1)
    return torch.where(distance > 0, coloured, red)


def pixelate(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Shrink to a `share` of each side and enlarge again with a box filter, in 8 bits at every step."""
    share = setting.parameters
    h, w = x_bchw.shape[-2:]
    high, wide = int(h * share), int(w * share)
    small = _box_rows(_transpose(x_bchw * 255), wide)  # rows are added and copied faster than columns
    small = _transpose(_box_rows(_transpose(small), high).div_(255))
    rows, columns = (_nearest(a, b).to(x_bchw.device) for a, b in ((high, h), (wide, w)))
    return _transpose(small.index_select(2, columns)).index_select(2, rows)


def _transpose(x_bchw: Tensor) -> Tensor:
    return x_bchw.transpose(2, 3).contiguous()


def _box_rows(x_bchw: Tensor, smaller: int) -> Tensor:
    """Return `smaller` rows, each the rounded mean of those in its window."""
    taps, shares = box_windows(x_bchw.shape[2], smaller)
    total = torch.zeros_like(x_bchw[:, :, :smaller])
    for rows, share in zip(taps.to(x_bchw.device), shares.to(x_bchw.device), strict=True):
        total.addcmul_(x_bchw.index_select(2, rows), share)
    return total.add_(0.5 + 1e-3).floor_()


@lru_cache(maxsize=64)
def box_windows(size: int, smaller: int) -> tuple[Tensor, Tensor]:
    """Return the pixels whose centres lie in each new pixel, left end excluded, [most, smaller], and their weights.

    Shares are [most, smaller, 1]; where a window has fewer than the most, they are 0.
    """
    ratio = size / smaller
    centres = (np.arange(smaller)[:, None] + 0.5) * ratio
    distance = (np.arange(size) - centres + 0.5) * (1.0 / ratio)  # rounded as Pillow does, for pixels on a border
    first, end = (np.floor(centres + way * 0.5 * ratio + 0.5) for way in (-1, 1))
    window = (np.arange(size) >= first) & (np.arange(size) < end)
    inside = window & (distance > -0.5) & (distance <= 0.5)
    counts = inside.sum(1)
    steps = np.arange(counts.max())[:, None]
    taps = np.minimum(inside.argmax(1) + steps, size - 1)
    shares = (steps < counts) / counts
    return torch.from_numpy(taps), torch.from_numpy(shares.astype(np.float32))[..., None]


@lru_cache(maxsize=64)
def _nearest(size: int, larger: int) -> Tensor:
    """Return, for each of `larger` pixels, the one of `size` that contains its centre."""
    return torch.from_numpy(((np.arange(larger) + 0.5) * (size / larger)).astype(np.int64))


def elastic_transform(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Apply a random affine map (three points moved by up to `shift`), then move every pixel by smooth noise.

    The noise is uniform in +-1, smoothed by sigma pixels and multiplied by `strength`. What smoothing leaves of it
    falls with sigma, so that `strength` is scaled twice for displacements that scale once.
    """
    strength, sigma, shift = setting.parameters
    scale = setting.scale
    h, w = x_bchw.shape[-2:]
    moved = draws.uniform(3, 2).double().mul_(2).sub_(1).mul_(shift * scale)
    x = _sample(x_bchw, affine_places(moved, h, w), repeat_border=False)
    if strength == 0:
        return x
    noise = draws.uniform(2, h, w).mul_(2).sub_(1)
    by_b2hw = gaussian_smooth(noise, sigma * scale, truncate=3.0, border="reflect").mul_(strength * scale**2)
    return _sample(x, by_b2hw.permute(0, 2, 3, 1) + _grid(h, w, x.device), repeat_border=True)


def affine_places(moved_b32: Tensor, h: int, w: int) -> Tensor:
    """Return where each pixel comes from, [B, h, w, 2] as (x, y), if three points around the centre move by `moved`."""
    middle = torch.tensor([w // 2, h // 2], dtype=torch.float64)
    side = min(h, w) // 3
    points = middle + side * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    points = points.to(moved_b32.device)
    targets = F.pad(points + moved_b32, (0, 1), value=1.0)
    back_b32: Tensor = torch.linalg.solve(targets, points.expand_as(moved_b32))
    grid = F.pad(_grid(h, w, moved_b32.device).double(), (0, 1), value=1.0)
    return (grid.reshape(1, h * w, 3) @ back_b32).reshape(-1, h, w, 2).float()


def _grid(h: int, w: int, device: torch.device) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([columns, rows], -1).float()


def _sample(x_bchw: Tensor, places_bhw2: Tensor, repeat_border: bool) -> Tensor:
    """Interpolate linearly at (x, y); beyond the border it is reflected, with or without repeating the edge pixel."""
    h, w = x_bchw.shape[-2:]
    span = torch.tensor([w, h], device=x_bchw.device, dtype=torch.float32)
    unit = (places_bhw2 * 2 + 1) / span - 1 if repeat_border else places_bhw2 * 2 / (span - 1) - 1
    return F.grid_sample(x_bchw, unit, mode="bilinear", padding_mode="reflection", align_corners=not repeat_border)


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
