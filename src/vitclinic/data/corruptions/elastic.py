"""Elastic deformation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.filtering import gaussian_smooth
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
