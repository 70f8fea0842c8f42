"""Blurs: defocus (a disk), glass (pixels moved at random), motion, zoom and Gaussian; and the filters of others.

Shared by corruptions are the 256 levels of a pixel as floats in [0, 1], conversion to grey, and linear filters: a
Gaussian along both axes, as banded matrices, and correlation with a square kernel.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.corruptions.noise import Draws
from vitclinic.data.corruptions.parameters import Setting

_SLACK = 1e-4
"""Tolerance in levels: a value this far below an integer level counts as it; float32 rounding is far smaller."""


def floor_to_level(x: Tensor) -> Tensor:
    """Clip to [0, 1] and truncate to the next lower level, as the conversion to 8 bits does in the published code."""
    return torch.add(torch.full((), _SLACK, device=x.device), x, alpha=255).clamp_(0, 255).floor_().div_(255)


def round_to_level(x: Tensor) -> Tensor:
    """Clip to [0, 1] and round to the nearest level."""
    return (x * 255).clamp_(0, 255).round_().div_(255)


def luma(x_bchw: Tensor) -> Tensor:
    """Convert RGB to grey by the Rec. 601 weights, [B, 1, H, W]; grey images are returned as they are."""
    if x_bchw.shape[1] == 1:
        return x_bchw
    return (x_bchw[:, :1] * 0.299).add_(x_bchw[:, 1:2], alpha=0.587).add_(x_bchw[:, 2:], alpha=0.114)


Border = Literal["nearest", "reflect"]
"""a a | a b c | c c, or b a | a b c | c b."""

_TILE = 64
"""Rows of a banded matrix that are multiplied at a time: the zeros outside of the band cost nothing then."""


def gaussian_smooth(x_bchw: Tensor, sigma: float, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """Smooth by a Gaussian of `sigma` pixels, truncated at `truncate` sigmas, along both axes."""
    h, w = x_bchw.shape[-2:]
    rows = gaussian_matrix(h, sigma, truncate, border)
    columns = gaussian_matrix(w, sigma, truncate, border)
    return along_columns(along_rows(x_bchw, rows), columns)


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    """Return the filter of one axis as a matrix, [size, size]."""
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2) if radius else np.ones(1)
    places = np.arange(size)[:, None] + offsets
    if border == "nearest":
        places = places.clip(0, size - 1)
    else:
        places = places % (2 * size)
        places = np.minimum(places, 2 * size - 1 - places)
    matrix = np.zeros((size, size))
    np.add.at(matrix, (np.arange(size)[:, None], places), kernel / kernel.sum())
    return torch.from_numpy(matrix.astype(np.float32))


def along_rows(x_bchw: Tensor, matrix: Tensor) -> Tensor:
    """Apply the matrix to every column of pixels: [..., in, W] to [..., out, W]."""
    matrix = matrix.to(x_bchw.device)
    if len(matrix) <= _TILE:
        return matrix @ x_bchw
    y = x_bchw.new_empty(*x_bchw.shape[:-2], len(matrix), x_bchw.shape[-1])
    for rows, band in _bands(matrix):
        y[..., rows, :] = matrix[rows, band] @ x_bchw[..., band, :]
    return y


def along_columns(x_bchw: Tensor, matrix: Tensor) -> Tensor:
    """Apply the matrix to every row of pixels: [..., H, in] to [..., H, out]."""
    matrix = matrix.to(x_bchw.device)
    flat = x_bchw.reshape(-1, x_bchw.shape[-1])
    if len(matrix) <= _TILE:
        y = flat @ matrix.T
    else:
        y = flat.new_empty(len(flat), len(matrix))
        for rows, band in _bands(matrix):
            y[:, rows] = flat[:, band] @ matrix[rows, band].T
    return y.reshape(*x_bchw.shape[:-1], len(matrix))


def _bands(matrix: Tensor) -> list[tuple[slice, slice]]:
    """Return blocks of rows, each with the columns in which it is not zero."""
    bands: list[tuple[slice, slice]] = []
    for start in range(0, len(matrix), _TILE):
        rows = slice(start, min(start + _TILE, len(matrix)))
        used = matrix[rows].any(0).nonzero()
        bands.append((rows, slice(int(used[0]), int(used[-1]) + 1)))
    return bands


def correlate(x_bchw: Tensor, kernel: NDArray[np.float64]) -> Tensor:
    """Correlate with a square kernel of odd side; the border reflects without repeating the edge (c b | a b c)."""
    reach = len(kernel) // 2
    padded = F.pad(x_bchw, (reach,) * 4, mode="reflect")
    c, h, w = padded.shape[1:]
    weights = torch.from_numpy(kernel.astype(np.float32)).to(x_bchw.device)
    if len(kernel) <= 7:
        return F.conv2d(padded, weights.expand(c, 1, *weights.shape), groups=c)
    size = (_fast_length(h), _fast_length(w))
    spectrum = torch.fft.rfft2(weights, s=size).conj()
    filtered: Tensor = torch.fft.irfft2(torch.fft.rfft2(padded, s=size) * spectrum, s=size)
    return filtered[..., : h - 2 * reach, : w - 2 * reach]


def _fast_length(size: int) -> int:
    """Return the next even length that is a product of 2, 3 and 5."""
    from scipy.fft import next_fast_len

    return 2 * int(next_fast_len(-(-size // 2), real=True))


_NEGLIGIBLE = 1e-6
"""Share of a kernel's weights that may be dropped: less than a thousandth of a level."""


def gaussian_blur(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Blur by a Gaussian of sigma pixels; the border is repeated."""
    sigma = setting.parameters
    return gaussian_smooth(x_bchw, sigma * setting.scale)


def defocus_blur(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Blur by a disk of radius pixels, itself smoothed by a Gaussian of `softness` pixels."""
    radius, softness = setting.parameters
    return correlate(x_bchw, disk(radius * setting.scale, softness))


@lru_cache(maxsize=64)
def disk(radius: float, softness: float) -> NDArray[np.float64]:
    """Return the kernel: a disk on a 17 x 17 grid (larger if it does not fit), smoothed over 3 x 3 (5 x 5) pixels."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line = np.arange(-half, half + 1)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    padded = np.pad(flat / flat.sum(), reach, mode="reflect")
    near = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (near / softness) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, weights, mode="valid")
    used = int(np.abs(line[padded.any(axis=0)]).max())
    return padded[half - used : half + used + 1, half - used : half + used + 1]


def motion_blur(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Blur by half a Gaussian along a line at -45 to 45 degrees; the result is rounded, not truncated."""
    radius, sigma = setting.parameters
    angles = draws.uniform(1)[:, 0].double().mul_(90).sub_(45)
    return round_to_level(along_lines(x_bchw, radius * setting.scale, sigma * setting.scale, angles))


def along_lines(x_bchw: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Apply ImageMagick's motion blur: 2 ceil(radius) + 1 pixels, Gaussian weights from the first on, border repeated.

    `angles` [B] are in degrees.
    """
    weights = line_weights(radius, sigma)
    steps = np.arange(len(weights))
    turns = np.deg2rad(angles.cpu().numpy())[:, None]
    down = np.ceil(steps * np.sin(turns) - 0.5).astype(int)
    right = np.ceil(steps * np.cos(turns) - 0.5).astype(int)
    h, w = x_bchw.shape[-2:]
    reach = len(weights)
    padded = F.pad(x_bchw, (reach,) * 4, mode="replicate")
    blurred = torch.zeros_like(x_bchw)
    for image, result, *places in zip(padded, blurred, (down + reach).tolist(), (right + reach).tolist(), strict=True):
        for y, x, share in zip(*places, weights.tolist(), strict=True):
            result.add_(image[:, y : y + h, x : x + w], alpha=share)
    return blurred


def line_weights(radius: float, sigma: float) -> NDArray[np.float64]:
    """Return the weights of the pixels on a line, without the negligible ones at its end."""
    weights = np.exp(-0.5 * (np.arange(2 * math.ceil(radius) + 1) / sigma) ** 2)
    weights /= weights.sum()
    return weights[: int((np.cumsum(weights) < 1 - _NEGLIGIBLE).sum()) + 1]


def zoom_blur(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Average the image and its centre magnified by 1, 1 + step, 1 + 2 step, ..."""
    stop, step = setting.parameters
    factors = np.arange(1, stop, step).tolist()  # rounding decides whether the last one is in: as published
    total = 2 * x_bchw  # the image itself, and a magnification of 1
    for factor in factors[1:]:
        total += magnify(x_bchw, factor)
    return total.div_(len(factors) + 1)


def magnify(x_bchw: Tensor, factor: float) -> Tensor:
    """Magnify the centre to the size of the image by linear interpolation with aligned corners."""
    h, w = x_bchw.shape[-2:]
    return fill(centre(x_bchw, factor), factor, (h, w))


def centre(x_bchw: Tensor, factor: float) -> Tensor:
    """Return the middle part of the image, 1/factor of each side."""
    h, w = x_bchw.shape[-2:]
    high, wide = math.ceil(h / factor), math.ceil(w / factor)
    top, left = (h - high) // 2, (w - wide) // 2
    return x_bchw[..., top : top + high, left : left + wide]


def fill(part_bchw: Tensor, factor: float, size: tuple[int, int]) -> Tensor:
    """Magnify a part by `factor` and crop the result to `size` at its centre."""
    high, wide = (round(side * factor) for side in part_bchw.shape[-2:])
    large = F.interpolate(part_bchw, size=(high, wide), mode="bilinear", align_corners=True)
    top, left = (high - size[0]) // 2, (wide - size[1]) // 2
    return large[..., top : top + size[0], left : left + size[1]]


def glass_blur(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Apply a Gaussian blur, move pixels by up to `reach`, and blur again.

    The published loop goes from the lower right to the upper left and means to swap each pixel with one at most `reach`
    away. Its assignment copies instead (the first copy overwrites what the second reads), so the published images have
    copies, and so have ours. A pixel's source may have been replaced before: following such chains is `sources`.
    """
    sigma, reach, times = setting.parameters
    sigma, reach = sigma * setting.scale, max(1, round(reach * setting.scale))
    b, c, h, w = x_bchw.shape
    pixels = floor_to_level(gaussian_smooth(x_bchw, sigma)).flatten(2)
    for _ in range(times):
        moves = draws.integers(-reach, reach, 2, h - 2 * reach, w - 2 * reach)
        pixels = pixels.gather(2, sources(moves, reach, h, w)[:, None].expand(b, c, h * w))
    return gaussian_smooth(pixels.reshape(b, c, h, w), sigma)


def sources(moves_b2yx: Tensor, reach: int, h: int, w: int) -> Tensor:
    """Return which pixel of the flattened image ends up at each place, [B, h w].

    `moves` are (down, right) of the pixels from row and column `reach` + 1 on, in reading order. The loop goes through
    them backwards: a pixel that takes from a later one, in reading order, takes what that one has taken.
    """
    b = len(moves_b2yx)
    place = torch.arange(h * w, device=moves_b2yx.device)
    takes = place.reshape(1, h, w).repeat(b, 1, 1)
    inner = (slice(None), slice(reach + 1, h - reach + 1), slice(reach + 1, w - reach + 1))
    takes[inner] += moves_b2yx[:, 0] * w + moves_b2yx[:, 1]
    takes = takes.flatten(1)
    moved = torch.zeros(h, w, dtype=torch.bool, device=place.device)
    moved[inner[1:]] = True
    chained = (takes > place) & moved.flatten()[takes]
    if not chained.any():
        return takes
    # Pointer jumping: after k rounds every pixel knows the one 2^k links further, or the end of its chain.
    link = torch.where(chained, takes, place)
    while True:
        further = link.gather(1, link)
        if torch.equal(further, link):
            return takes.gather(1, link)
        link = further
