"""Textures of frost, made here: the published sets use five photographs, which are not ours to ship.

A texture is a periodic field of feathery ridges: fractal noise whose coordinates are bent by other noise, its zero
lines drawn bright, over patches of thinner and thicker ice, in blue to white. The five are always the same.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.randomness import generator

TEXTURES = 5
_SIDE = 512
_DARK, _LIGHT = (0.05, 0.11, 0.2), (0.9, 0.95, 1.0)


@lru_cache(maxsize=32)
def texture(number: int, magnification: float, smallest: int) -> Tensor:
    """Texture `number` at that magnification, uint8 [3, side, side]; repeated until it exceeds `smallest`."""
    image = torch.from_numpy(_texture(number))[None]
    side = max(8, round(_SIDE * magnification))
    if side != _SIDE:
        image = F.interpolate(image, size=(side, side), mode="bilinear", antialias=True)
    times = -(-(smallest + 1) // side)
    return image[0].repeat(1, times, times).mul_(255).round_().clamp_(0, 255).byte()


@lru_cache(maxsize=TEXTURES)
def _texture(number: int) -> NDArray[np.float32]:
    """[3, side, side] in [0, 1]."""
    random = generator("frost", number)
    bend = 20.0 + 7.0 * number
    rows, columns = np.meshgrid(np.arange(_SIDE), np.arange(_SIDE), indexing="ij")
    ice = np.zeros((_SIDE, _SIDE))
    for stretch, weight in ((1.0, 0.6), (3.0, 0.4)):
        field = _fractal(random, 1.6, stretch, lowest=6)
        bent = _at(field, rows + bend * _fractal(random, 3.0), columns + bend * _fractal(random, 3.0))
        ice += weight * np.exp(-3.0 * np.abs(bent))
    patches = 1 / (1 + np.exp(-2.0 * _fractal(random, 2.6) - 0.4))
    grain = 0.06 * _fractal(random, 0.6)
    thickness = np.clip(0.08 + patches * (0.22 + 1.0 * ice) + grain, 0, 1)[None]
    dark, light = (np.asarray(colour)[:, None, None] for colour in (_DARK, _LIGHT))
    return np.asarray(dark + (light - dark) * thickness, dtype=np.float32)


def _fractal(random: np.random.Generator, power: float, stretch: float = 1.0, lowest: int = 1) -> NDArray[np.float64]:
    """Periodic Gaussian noise of unit variance with amplitude spectrum f^-power, `stretch` times longer than wide.

    No wave is longer than the side divided by `lowest`.
    """
    rows, columns = np.fft.fftfreq(_SIDE)[:, None] * stretch, np.fft.rfftfreq(_SIDE)[None]
    frequency = np.hypot(rows, columns)
    frequency[frequency < (lowest - 0.5) / _SIDE] = np.inf
    spectrum = np.fft.rfft2(random.standard_normal((_SIDE, _SIDE))) * frequency**-power
    field: NDArray[np.float64] = np.fft.irfft2(spectrum, (_SIDE, _SIDE))
    field -= field.mean()
    field /= field.std()
    return field


def _at(field: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.ndimage import map_coordinates

    found: NDArray[np.float64] = map_coordinates(field, [rows, columns], order=1, mode="grid-wrap")
    return found
