"""Shared by corruptions: the 256 levels of a pixel as floats in [0, 1], conversion to grey, linear filters.

Filters are a Gaussian along both axes, as banded matrices, and correlation with a square kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

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
