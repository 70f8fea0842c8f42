"""Brightness, contrast and saturation.

Value and saturation are those of HSV: with hue and saturation kept, R, G and B are proportional to the value; with hue
and value kept, their distances from the value are proportional to the saturation. No conversion is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.levels import luma
from vitclinic.data.corruptions.parameters import Setting


def brightness(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """`more` added to the value; black becomes grey."""
    more = setting.parameters
    value = x_bchw.amax(1, keepdim=True)
    brighter = (value + more).clamp_(max=1)
    return torch.where(value > 0, x_bchw * (brighter / value), brighter)


def contrast(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Distances from the channel's mean multiplied by `share`."""
    share = setting.parameters
    means = x_bchw.mean(3, keepdim=True).double().mean(2, keepdim=True).float()  # long sums need the digits
    return (x_bchw - means).mul_(share).add_(means)


def saturate(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """The saturation times `factor` plus `more`; what has no hue counts as red. Grey images come back as grey."""
    if x_bchw.shape[1] == 1:
        return luma(_saturated(x_bchw.expand(-1, 3, -1, -1), *setting.parameters))
    return _saturated(x_bchw, *setting.parameters)


def _saturated(x_bchw: Tensor, factor: float, more: float) -> Tensor:
    value = x_bchw.amax(1, keepdim=True)
    distance = value - x_bchw.amin(1, keepdim=True)
    saturation = (distance / value.clamp(min=1e-6)).mul_(factor).add_(more).clamp_(max=1)
    share = (value * saturation).div_(distance.clamp(min=1e-6))
    coloured = value - (value - x_bchw).mul_(share)
    red = torch.cat([value, *[value - value * saturation] * 2], 1)
    return torch.where(distance > 0, coloured, red)
