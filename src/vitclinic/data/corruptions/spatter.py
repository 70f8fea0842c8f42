"""Spatter: drops of water or of mud."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.edges import canny, distance_to
from vitclinic.data.corruptions.filtering import gaussian_smooth
from vitclinic.data.corruptions.levels import luma
from vitclinic.data.corruptions.parameters import Setting

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FARTHEST = 20
_RELIEF = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))


def spatter(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Where smooth noise exceeds a threshold there is water, bright by its distance from the drops' edges, or mud."""
    mean, deviation, sigma, threshold, strength, liquid = setting.parameters
    noise = draws.normal(1, *x_bchw.shape[2:])
    # Smoothing by a longer sigma leaves less of the noise: with both scaled, the same share is covered.
    layer = gaussian_smooth(noise.mul_(deviation * setting.scale).add_(mean), sigma * setting.scale)
    if liquid == "mud":
        cover = gaussian_smooth((layer > threshold).float(), strength * setting.scale)
        cover = torch.where(cover < 0.8, 0.0, cover)
        return x_bchw * (1 - cover) + _colour(_MUD, x_bchw) * cover
    drops = F.threshold(layer, threshold, 0.0).mul_(255).floor_()
    drops.sub_(torch.ge(drops, 256, out=torch.empty_like(drops)), alpha=256)  # 8 bits wrap, in the published images too
    depth = drops * _relief(drops)
    depth = depth / depth.amax((2, 3), keepdim=True).clamp_(min=1)  # an image without drops stays as it is
    return x_bchw + depth.mul_(strength) * _colour(_WATER, x_bchw)


def _relief(drops_b1hw: Tensor) -> Tensor:
    """How light falls on the drops, 0 to 255: distances from their edges, equalised and lit from one side."""
    distance = distance_to(canny(drops_b1hw, 50, 150), _FARTHEST)
    level = equalised(box_mean(distance).add_(1e-4).floor_())
    kernel = torch.tensor(_RELIEF, device=level.device)[None, None]
    lit = F.conv2d(F.pad(level, (1,) * 4, mode="reflect"), kernel).clamp_(0, 255)
    return box_mean(lit).round_()


def box_mean(x_b1hw: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels; the border reflects (b | a b)."""
    return F.avg_pool2d(F.pad(x_b1hw, (1,) * 4, mode="reflect"), 3, 1)


def equalised(levels_b1hw: Tensor) -> Tensor:
    """Whole levels up to `_FARTHEST`, spread over 0 to 255 so that their histogram is flat; one level alone is kept."""
    flat = levels_b1hw.flatten(1).long()
    bins, total = _FARTHEST + 1, flat.shape[1]
    counts = flat.new_zeros(len(flat), bins).scatter_add_(1, flat, torch.ones_like(flat))
    lowest = (counts > 0).int().argmax(1, keepdim=True)
    first = counts.gather(1, lowest)
    spread = ((counts.cumsum(1) - first) * (255.0 / (total - first).clamp(min=1))).round_().clamp_(min=0)
    spread = torch.where(first == total, lowest.float(), spread)
    return spread.gather(1, flat).reshape(levels_b1hw.shape)


def _colour(rgb: tuple[float, float, float], like_bchw: Tensor) -> Tensor:
    colour = torch.tensor(rgb, device=like_bchw.device).reshape(1, 3, 1, 1)
    return luma(colour) if like_bchw.shape[1] == 1 else colour
