"""Crops of self-supervised learning: random resized crops with changed colours, drawn from each sample's key.

The changes are DINO's [Caron et al., ICCV 2021]: flip, brightness, contrast, saturation and hue (together, with
probability 0.8), grey (0.2), Gaussian blur and solarization. Blur is given for 224 pixels and scales with the side.
Shapes: B images, h x w pixels, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.augment import flip, random_resized_crop, to_unit_interval
from vitclinic.data.decoding import Images, Size
from vitclinic.data.randomness import Keys, uniforms

BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.2, 0.1
JITTERED, GREYED = 0.8, 0.2
BLUR_SIGMA = (0.1, 2.0)
"""Pixels of standard deviation, for a side of 224."""
_LEAST_SIGMA = 0.2
"""Below this a blur changes no byte of an image."""
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Crop:
    """One view of an image: a random resized crop with changed colours.

    Attributes:
        size: Height and width in pixels.
        scale: Least and largest share of the image's area.
        flip: Mirror half of the crops.
        blur: Probability of a Gaussian blur.
        solarize: Probability of inverting all values above one half.

    Example:
        >>> keys = np.arange(2, dtype=np.uint64)
        >>> Crop((16, 16), (0.05, 0.4))(np.zeros((2, 32, 32, 3), np.uint8), keys).shape
        torch.Size([2, 3, 16, 16])
    """

    size: Size
    scale: tuple[float, float]
    flip: bool = True
    blur: float = 0.0
    solarize: float = 0.0

    @property
    def is_heavy(self) -> bool:
        """True: images are cropped one by one."""
        return True

    def __call__(self, images: Images, keys: Keys) -> Tensor:
        x_bhwc = random_resized_crop(images, keys, self.size, self.scale)
        x_bchw = to_unit_interval(np.ascontiguousarray(flip(x_bhwc, keys)) if self.flip else x_bhwc)
        x_bchw = change_colours(x_bchw, keys)
        x_bchw = blur(x_bchw, keys, self.blur)
        inverted = torch.from_numpy(uniforms(keys, "solarize", 1)[:, 0] < self.solarize)
        return torch.where(inverted[:, None, None, None] & (x_bchw >= 0.5), 1 - x_bchw, x_bchw)


def change_colours(x_bchw: Tensor, keys: Keys, factor: float = 1.0, grey: float = GREYED) -> Tensor:
    """Change brightness, contrast, saturation and hue of most images, and make some grey; grey images have no hue.

    Args:
        x_bchw: Images in [0, 1].
        keys: The random key of each.
        factor: Factor on the strength of all changes.
        grey: Probability of a grey image.
    """
    draws = uniforms(keys, "colour", 6)
    jittered = draws[:, 0] < JITTERED
    bright, contrast, saturate = (
        _column(np.where(jittered, 1 + factor * strength * (2 * draws[:, row] - 1), 1.0))
        for row, strength in ((1, BRIGHTNESS), (2, CONTRAST), (3, SATURATION))
    )
    x_bchw = (x_bchw * bright).clamp_(0, 1)
    mean = _grey(x_bchw).mean((2, 3), keepdim=True)
    x_bchw = (mean + contrast * (x_bchw - mean)).clamp_(0, 1)
    if x_bchw.shape[1] == 1:
        return x_bchw
    x_bchw = _grey(x_bchw) + saturate * (x_bchw - _grey(x_bchw))
    x_bchw = _turn_hue(x_bchw, np.where(jittered, factor * HUE * (2 * draws[:, 4] - 1), 0.0)).clamp_(0, 1)
    greyed = torch.from_numpy(draws[:, 5] < grey)[:, None, None, None]
    return torch.where(greyed, _grey(x_bchw), x_bchw)


def _column(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values).float()[:, None, None, None]


def _grey(x_bchw: Tensor) -> Tensor:
    """Return the luma of images, [B, 1, h, w]."""
    if x_bchw.shape[1] == 1:
        return x_bchw
    return torch.einsum("bchw,c->bhw", x_bchw, torch.tensor(_LUMA))[:, None]


def _turn_hue(x_bchw: Tensor, turns: NDArray[np.float64]) -> Tensor:
    """Turn colours around the grey axis by so many turns each: grey stays, and so does the sum of the channels.

    The rotation by an angle a around (1, 1, 1) / sqrt(3) is c I + (1 - c) / 3 + s / sqrt(3) [axis] (Rodrigues).
    """
    angle = torch.from_numpy(2 * np.pi * turns).float()[:, None, None]
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / 3**0.5
    rotation = angle.cos() * torch.eye(3) + (1 - angle.cos()) / 3 + angle.sin() * cross
    return torch.einsum("bij,bjhw->bihw", rotation, x_bchw)


def blur(x_bchw: Tensor, keys: Keys, probability: float) -> Tensor:
    """Blur images with `probability` by a Gaussian, whose width is uniform in `BLUR_SIGMA` times side / 224."""
    draws = uniforms(keys, "blur", 2)
    low, high = (sigma * min(x_bchw.shape[2:]) / 224 for sigma in BLUR_SIGMA)
    sigma = low + (high - low) * draws[:, 1]
    rows = np.flatnonzero((draws[:, 0] < probability) & (sigma > _LEAST_SIGMA))
    if not rows.size:
        return x_bchw
    radius = int(np.ceil(3 * high))
    chosen, (count, channels, height, width) = x_bchw[rows], x_bchw[rows].shape
    offsets = torch.arange(-radius, radius + 1)
    kernel = torch.exp(-0.5 * (offsets / torch.from_numpy(sigma[rows]).float()[:, None]) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(channels, 0)[:, None]
    margin = min(radius, height - 1, width - 1)
    padded = F.pad(chosen, [margin] * 4, mode="reflect")
    padded = F.pad(padded, [radius - margin] * 4, mode="replicate").reshape(
        1, count * channels, *_grown(chosen, radius)
    )
    down = F.conv2d(padded, kernel[..., None], groups=count * channels)
    across = F.conv2d(down, kernel[:, :, None], groups=count * channels)
    x_bchw[rows] = across.reshape(count, channels, height, width)
    return x_bchw


def _grown(x_bchw: Tensor, radius: int) -> Size:
    return x_bchw.shape[2] + 2 * radius, x_bchw.shape[3] + 2 * radius
