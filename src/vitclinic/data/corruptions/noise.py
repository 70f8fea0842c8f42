"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper), speckle; and small perturbations of images.

The random numbers of all corruptions are drawn here. A `Ball` is what lies within epsilon of images, in l_inf or l_2,
and within [0, 1].

`Draws` gives each image its own numbers, on any device, whatever else is in the batch. Words come from a counter that
is hashed with the image's key, uniform, normal and integer numbers from words. Poisson numbers are looked up in tables,
one word a number [Walker 1977: the alias method]. A distribution over K values is cut into K cells of equal weight,
each shared by two values at most: its own up to a threshold, and from there on another, its alias. A uniform word
chooses the cell by its upper bits and the value by the others. A pixel has 256 levels, so that shot noise needs no more
than 256 distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.corruptions.parameters import Setting
from vitclinic.data.randomness import sample_keys, words


class Draws:
    """Random numbers of a batch of images. Each call draws new ones for all images."""

    def __init__(
        self, purpose: str, seed: int, indices: Sequence[int] | NDArray[np.int64], device: torch.device | str = "cpu"
    ) -> None:
        rows = np.asarray(indices, dtype=np.int64)
        self.keys = sample_keys(seed, np.zeros_like(rows), rows)
        self.purpose = purpose
        self.device = torch.device(device)
        self._calls = 0

    def __len__(self) -> int:
        return len(self.keys)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers, [B, *shape], by the inverse distribution at uniform numbers; at most 5.4."""
        unit = self._bits(*shape).float().mul_(2.0**-31).clamp_(2.0**-24 - 1, 1 - 2.0**-24)
        return unit.erfinv_().mul_(math.sqrt(2))

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers in [0, 1), [B, *shape]."""
        return self._uniform(*shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw integers from `low` to `high` - 1, [B, *shape], as int64."""
        return self._uniform(*shape).mul_(high - low).floor_().add_(low).long()

    def poisson(self, rates: tuple[float, ...], which: Tensor) -> Tensor:
        """Draw Poisson numbers with the rates `rates[which]`, where `which` is int32 [B, ...]."""
        return poisson_table(rates, self.device).look_up(which, self._bits(*which.shape[1:])).float()

    def _uniform(self, *shape: int) -> Tensor:
        return self._bits(*shape).bitwise_and_(-256).float().mul_(2.0**-32).add_(0.5)

    def _bits(self, *shape: int) -> Tensor:
        """Return random 32-bit words as int32 [B, *shape]; the upper bits are the better ones.

        n times the golden ratio (a Weyl sequence), mixed by Wellons' lowbias32 but for its last step, which is for the
        lower bits. One key is where an image starts; without the other, which comes in between, two images that
        start close to each other would share a part of one sequence.
        """
        keys = torch.from_numpy(words(self.keys, f"{self.purpose} {self._calls}", 1).view(np.int32)).to(self.device)
        self._calls += 1
        x = _weyl(math.prod(shape), self.device) + keys[:, :1]
        spare = torch.empty_like(x)
        _fold(x, 16, spare).mul_(0x7FEB352D).add_(keys[:, 1:])
        _fold(x, 15, spare).mul_(0x846CA68B - 2**32)
        return x.reshape(len(self), *shape)


@lru_cache(maxsize=16)
def _weyl(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device).mul_(0x9E3779B9 - 2**32)


def _fold(x: Tensor, by: int, spare: Tensor) -> Tensor:
    """Compute x ^= x >> by in place, with a logical shift."""
    torch.bitwise_right_shift(x, by, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - by)) - 1))


@dataclass(frozen=True)
class AliasTable:
    """Alias table of distributions over 0 to 2^cell_bits - 1; distribution d starts at entry d 2^cell_bits."""

    threshold: Tensor
    alias: Tensor
    cell_bits: int

    def look_up(self, which: Tensor, bits: Tensor) -> Tensor:
        """Return a value of distribution `which` for every random word, all int32."""
        rest = 32 - self.cell_bits
        cell = (bits >> rest).bitwise_and_((1 << self.cell_bits) - 1)
        place = (which << self.cell_bits).add_(cell).flatten()
        threshold, alias = (table.index_select(0, place).reshape(bits.shape) for table in (self.threshold, self.alias))
        return torch.where((bits & ((1 << rest) - 1)) < threshold, cell, alias)


@lru_cache(maxsize=16)
def poisson_table(rates: tuple[float, ...], device: torch.device) -> AliasTable:
    """Return one distribution for each rate; the tail that is cut off is far less likely than one random word."""
    from scipy.special import gammaln, xlogy

    most = max(rates)
    cell_bits = math.ceil(math.log2(most + 8 * math.sqrt(most) + 16))
    k, rate = np.arange(1 << cell_bits), np.array(rates)[:, None]
    shares = np.exp(xlogy(k, rate) - rate - gammaln(k + 1.0))
    threshold, alias = _cells(shares / shares.sum(1, keepdims=True))
    scaled = np.rint(threshold * 2.0 ** (32 - cell_bits)).astype(np.int32)
    return AliasTable(
        torch.from_numpy(scaled.ravel()).to(device), torch.from_numpy(alias.ravel()).to(device), cell_bits
    )


def _cells(shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return thresholds in [0, 1] and aliases, [distributions, K]: the richest value fills up the poorest's cell."""
    count = shares.shape[1]
    rows, rest = np.arange(len(shares)), shares * count
    threshold, alias = np.ones_like(rest), np.tile(np.arange(count, dtype=np.int32), (len(rest), 1))
    for _ in range(count - 1):
        poor, rich = rest.argmin(1), rest.argmax(1)
        has = np.minimum(rest[rows, poor], 1.0)
        threshold[rows, poor], alias[rows, poor] = has, rich
        rest[rows, rich] -= 1 - has
        rest[rows, poor] = 1.0  # full: neither poor nor rich from here on
    return threshold, alias


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


Norm = Literal["linf", "l2"]


@dataclass(frozen=True)
class Ball:
    """Ball of the images in [0, 1] that differ from given ones by at most `epsilon` in a norm.

    Example:
        >>> x = torch.tensor([[[[0.5, 0.1]]]])
        >>> Ball("linf", 0.2).nearest(x, x + torch.tensor([1.0, -1.0]))
        tensor([[[[0.7000, 0.0000]]]])
        >>> Ball("l2", 0.5).steepest(torch.tensor([[[[3.0, 4.0]]]]))
        tensor([[[[0.6000, 0.8000]]]])
    """

    norm: Norm
    epsilon: float

    def nearest(self, images: Tensor, moved: Tensor) -> Tensor:
        """Project `moved` images [B, C, height, width] into the ball around `images`, then into [0, 1].

        The second projection can only shorten a difference, so that both constraints hold.
        """
        delta = moved - images
        if self.norm == "linf":
            delta = delta.clamp(-self.epsilon, self.epsilon)
        else:
            delta = delta * (self.epsilon / lengths(delta).clamp_min(1e-30)).clamp_max(1)
        return (images + delta).clamp(0, 1)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Return the perturbation of norm 1 along the steepest ascent of a gradient; NaNs count as 0."""
        if self.norm == "linf":
            return gradient.sign().nan_to_num(0.0)
        numbers = gradient.where(gradient.isfinite(), 0.0)
        largest = numbers.abs().amax((1, 2, 3), keepdim=True)
        scaled = numbers / largest.where(largest > 0, 1.0)  # its square can then neither vanish nor overflow
        return scaled / lengths(scaled).clamp_min(1.0)


def lengths(delta: Tensor) -> Tensor:
    """Return the l_2 norm of each difference, [B, 1, 1, 1]."""
    found: Tensor = torch.linalg.vector_norm(delta, dim=(1, 2, 3), keepdim=True)
    return found
