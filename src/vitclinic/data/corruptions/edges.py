"""Edges, and distances from them, as OpenCV finds them: Canny's detector and the 5 x 5 chamfer distance."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_DIAGONAL, _KNIGHT = 1.4, 2.1969
"""The lengths of a diagonal step and of a knight's move; that of a straight step is 1."""


def canny(x_b1hw: Tensor, low: float, high: float) -> Tensor:
    """Edges of images of whole levels: thin ridges of the gradient above `low` that touch one above `high`.

    3 x 3 Sobel derivatives with the border repeated; a gradient's size is |dx| + |dy|.
    """
    padded = F.pad(x_b1hw, (1,) * 4, mode="replicate")
    smooth_y = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    dx = smooth_y[..., 2:] - smooth_y[..., :-2]
    smooth_x = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    dy = smooth_x[..., 2:, :] - smooth_x[..., :-2, :]
    size = dx.abs() + dy.abs()
    thin = (size > low) & _is_ridge(size, dx, dy)
    strong = thin & (size > high)
    while True:
        grown = thin & (F.max_pool2d(strong.float(), 3, 1, 1) > 0)
        if torch.equal(grown, strong):
            return strong
        strong = grown


def _is_ridge(size: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Whether the gradient is largest along its own direction, to the nearest of four."""
    h, w = size.shape[-2:]
    padded = F.pad(size, (1,) * 4)

    def at(down: int, right: int) -> Tensor:
        return padded[..., 1 + down : 1 + down + h, 1 + right : 1 + right + w]

    flat = dy.abs() < math.tan(math.pi / 8) * dx.abs()
    steep = dy.abs() > math.tan(3 * math.pi / 8) * dx.abs()
    across = (size > at(0, -1)) & (size >= at(0, 1))
    along = (size > at(-1, 0)) & (size >= at(1, 0))
    falling = (size > at(-1, -1)) & (size > at(1, 1))
    rising = (size > at(-1, 1)) & (size > at(1, -1))
    slanted = torch.where((dx < 0) != (dy < 0), rising, falling)
    return torch.where(flat, across, torch.where(steep, along, slanted))


def distance_to(edges_b1hw: Tensor, farthest: int) -> Tensor:
    """The chamfer distance of each pixel to the nearest edge, at most `farthest`.

    The length of a path of straight, diagonal and knight's moves is, for a displacement (dx, dy), the largest of four
    linear forms, and grows with |dx|. So only the nearest edge of each row matters, and rows farther than `farthest` do
    not.
    """
    across = _within_rows(edges_b1hw, farthest)
    h = across.shape[-2]
    nearest = across.clone()
    padded = F.pad(across, (0, 0, farthest, farthest), value=float(farthest))
    for down in range(1, farthest):
        above = padded[..., farthest - down : farthest - down + h, :]
        below = padded[..., farthest + down : farthest + down + h, :]
        nearest = torch.minimum(nearest, chamfer(torch.minimum(above, below), down))
    return nearest.clamp_(max=float(farthest))


def chamfer(across: Tensor, down: float) -> Tensor:
    """The length of the shortest path over so many columns and rows, both not negative."""
    knight, slant = _KNIGHT - 2, 2 * _DIAGONAL - _KNIGHT
    shorter = _KNIGHT - _DIAGONAL
    mild = torch.maximum(across + knight * down, knight * across + down)
    return torch.maximum(mild, torch.maximum(shorter * across + slant * down, slant * across + shorter * down))


def _within_rows(edges_b1hw: Tensor, farthest: int) -> Tensor:
    """The distance of each pixel to the nearest edge in its row, at most `farthest`."""
    w = edges_b1hw.shape[-1]
    place = torch.arange(w, device=edges_b1hw.device)
    left = torch.where(edges_b1hw, place, -farthest).cummax(-1).values
    right = torch.where(edges_b1hw, place, w + farthest).flip(-1).cummin(-1).values.flip(-1)
    return torch.minimum(place - left, right - place).clamp_(max=farthest).float()
