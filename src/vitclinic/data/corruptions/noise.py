"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper) and speckle (multiplicative Gaussian)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitclinic.data.corruptions.parameters import Setting
from vitclinic.data.corruptions.sampling import Draws


def gaussian_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Add Gaussian noise: x + deviation n."""
    deviation = setting.parameters
    return draws.normal(*x_bchw.shape[1:]).mul_(deviation).add_(x_bchw)


def shot_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Apply shot noise: Poisson(x photons) / photons."""
    photons = setting.parameters
    rates = tuple(level / 255 * photons for level in range(256))
    return draws.poisson(rates, (x_bchw * 255).round_().int()).div_(photons)


def impulse_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Set a share of the values to 0 or 1, half of it each, in every channel independently."""
    share = setting.parameters
    draw = draws.uniform(*x_bchw.shape[1:])
    # As numbers, not as masks, which torch fills in ten times slower; what leaves [0, 1] is clipped.
    salt = torch.lt(draw, share / 2, out=torch.empty_like(draw))
    pepper = torch.ge(draw, 1 - share / 2, out=draw)
    return salt.add_(x_bchw).sub_(pepper)


def speckle_noise(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Apply multiplicative Gaussian noise: x + deviation n x."""
    deviation = setting.parameters
    return draws.normal(*x_bchw.shape[1:]).mul_(deviation).add_(1.0).mul_(x_bchw)
