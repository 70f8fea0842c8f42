"""Elastic deformation, pixelation and JPEG."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.io import decode_jpeg, encode_jpeg

from vitclinic.data.corruptions.drawing import Draws, in_threads
from vitclinic.data.corruptions.filtering import along_columns, along_rows, gaussian_smooth
from vitclinic.data.corruptions.parameters import Setting


def elastic_transform(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """A random affine map (three points moved by up to `shift`), then every pixel moved by smooth noise.

    The noise is uniform in +-1, smoothed by sigma pixels and multiplied by `strength`. What smoothing leaves of it
    falls with sigma, so that `strength` is scaled twice for displacements that scale once.
    """
    strength, sigma, shift = setting.parameters
    scale = setting.scale
    h, w = x_bchw.shape[-2:]
    moved = draws.uniform(3, 2).double().mul_(2).sub_(1).mul_(shift * scale)
    x = _sampled(x_bchw, affine_places(moved, h, w), repeat_border=False)
    if strength == 0:
        return x
    noise = draws.uniform(2, h, w).mul_(2).sub_(1)
    by_b2hw = gaussian_smooth(noise, sigma * scale, truncate=3.0, border="reflect").mul_(strength * scale**2)
    return _sampled(x, by_b2hw.permute(0, 2, 3, 1) + _grid(h, w, x.device), repeat_border=True)


def affine_places(moved_b32: Tensor, h: int, w: int) -> Tensor:
    """Where each pixel comes from, [B, h, w, 2] as (x, y), if three points around the centre move by so much."""
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


def _sampled(x_bchw: Tensor, places_bhw2: Tensor, repeat_border: bool) -> Tensor:
    """Linear interpolation at places (x, y); outside the image is reflected, its border pixel repeated or not."""
    h, w = x_bchw.shape[-2:]
    span = torch.tensor([w, h], device=x_bchw.device, dtype=torch.float32)
    unit = (places_bhw2 * 2 + 1) / span - 1 if repeat_border else places_bhw2 * 2 / (span - 1) - 1
    return F.grid_sample(x_bchw, unit, mode="bilinear", padding_mode="reflection", align_corners=not repeat_border)


def pixelate(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Made smaller to a `share` of each side and back, both as Pillow's box filter does, in 8 bits at every step."""
    share = setting.parameters
    h, w = x_bchw.shape[-2:]
    high, wide = int(h * share), int(w * share)
    small = (along_columns(x_bchw * 255, box_matrix(w, wide)) + 0.5 + 1e-3).floor_()
    small = (along_rows(small, box_matrix(h, high)) + 0.5 + 1e-3).floor_()
    rows, columns = (_nearest(a, b).to(x_bchw.device) for a, b in ((high, h), (wide, w)))
    wide_bcwh = small.div_(255).transpose(2, 3).index_select(2, columns)  # rows are copied faster than columns
    return wide_bcwh.transpose(2, 3).contiguous().index_select(2, rows)


@lru_cache(maxsize=64)
def box_matrix(size: int, smaller: int) -> Tensor:
    """[smaller, size]: the mean of the pixels whose centres lie in each new pixel, the left end excluded."""
    ratio = size / smaller
    centres = (np.arange(smaller)[:, None] + 0.5) * ratio
    distance = (np.arange(size) - centres + 0.5) * (1.0 / ratio)  # rounded as Pillow does, for pixels on a border
    first, end = (np.floor(centres + way * 0.5 * ratio + 0.5) for way in (-1, 1))
    window = (np.arange(size) >= first) & (np.arange(size) < end)
    inside = (window & (distance > -0.5) & (distance <= 0.5)).astype(np.float64)
    return torch.from_numpy((inside / inside.sum(1, keepdims=True)).astype(np.float32))


def _nearest(size: int, larger: int) -> Tensor:
    return torch.from_numpy(((np.arange(larger) + 0.5) * (size / larger)).astype(np.int64))


def jpeg_compression(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Through a JPEG of that quality, colours at half the resolution."""
    quality = setting.parameters
    # Colours last: what a JPEG is read from and written to in memory.
    pixels = (x_bchw * 255).round_().to(torch.uint8, memory_format=torch.channels_last).cpu()
    decoded = list(pixels)

    def some(rows: range) -> None:
        for row in rows:  # without the interpreter's lock, but for a moment
            decoded[row] = decode_jpeg(encode_jpeg(pixels[row], quality))

    in_threads(some, len(pixels))
    result = torch.empty_like(x_bchw)
    for row, image in enumerate(decoded):
        result[row] = image
    return result.div_(255)
