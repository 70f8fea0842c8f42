"""The digital corruptions: brightness, contrast, saturation, pixelation and elastic deformation.

Value and saturation are those of HSV: with hue and saturation kept, R, G and B are proportional to the value; with hue
and value kept, their distances from the value are proportional to the saturation. No conversion to HSV is needed. JPEG
is in `corruption`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitclinic.data.corruptions.blur import gaussian_smooth, luma
from vitclinic.data.corruptions.noise import Draws
from vitclinic.data.corruptions.parameters import Setting


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
