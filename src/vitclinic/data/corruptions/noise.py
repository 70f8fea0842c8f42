"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper) and speckle (multiplicative Gaussian)."""

from __future__ import annotations

from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.parameters import Setting


def gaussian_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """x + deviation n."""
    deviation = setting.parameters
    return draws.normal(*x_bchw.shape[1:]).mul_(deviation).add_(x_bchw)


def shot_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Poisson(x photons) / photons."""
    photons = setting.parameters
    return draws.poisson(x_bchw * photons).div_(photons)


def impulse_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """A share of the values becomes 0 or 1, half of it each; every channel by itself."""
    share = setting.parameters
    draw = draws.uniform(*x_bchw.shape[1:])
    return x_bchw.masked_fill(draw < share, 0.0).masked_fill_(draw < share / 2, 1.0)


def speckle_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """x + deviation n x."""
    deviation = setting.parameters
    return draws.normal(*x_bchw.shape[1:]).mul_(deviation).add_(1.0).mul_(x_bchw)
