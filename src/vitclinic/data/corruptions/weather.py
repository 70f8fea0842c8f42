"""Snow, frost and fog."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitclinic.data.corruptions.blur import along_lines, fill
from vitclinic.data.corruptions.drawing import Draws
from vitclinic.data.corruptions.frost_textures import TEXTURES, texture
from vitclinic.data.corruptions.levels import luma, rounded, truncated
from vitclinic.data.corruptions.parameters import Setting


def snow(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Flakes (magnified noise above a threshold), blurred along a fall of -135 to -45 degrees, over a whitened image.

    The flakes fall twice, the second time turned by 180 degrees.
    """
    mean, deviation, magnification, threshold, radius, sigma, keep = setting.parameters
    factor = max(1.0, magnification * setting.scale)
    h, w = x_bchw.shape[-2:]
    noise = draws.normal(1, math.ceil(h / factor), math.ceil(w / factor))
    flakes = fill(noise.mul_(deviation).add_(mean), factor, (h, w))
    flakes = truncated(torch.where(flakes < threshold, 0.0, flakes))
    angles = draws.uniform(1)[:, 0].double().mul_(90).sub_(135)
    flakes = rounded(along_lines(flakes, radius * setting.scale, sigma * setting.scale, angles))
    white = torch.maximum(x_bchw, luma(x_bchw) * 1.5 + 0.5)
    whitened: Tensor = (x_bchw * keep).add_(white, alpha=1 - keep)
    return whitened.add_(flakes).add_(flakes.flip(2, 3))


def frost(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """keep x + share f, where f is a random piece of one of five textures."""
    keep, share = setting.parameters
    c, h, w = x_bchw.shape[1:]
    # CIFAR-10-C takes the textures at a fifth of the size that ImageNet-C does.
    magnification = setting.scale * (0.2 if setting.parameter_set == "cifar10-c" else 1.0)
    draw = draws.uniform(3).cpu()
    frosted: Tensor = x_bchw * keep
    for row, (which, down, right) in enumerate(draw.tolist()):
        whole = texture(int(which * TEXTURES), magnification, max(h, w))
        top, left = int(down * (whole.shape[1] - h)), int(right * (whole.shape[2] - w))
        piece = whole[:, top : top + h, left : left + w].to(x_bchw.device).float().div_(255)
        frosted[row].add_(luma(piece[None])[0] if c == 1 else piece, alpha=share)
    return frosted


def fog(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """(x + thickness p) m / (m + thickness) with p a plasma fractal in [0, 1] and m the image's largest value."""
    thickness, decay = setting.parameters
    h, w = x_bchw.shape[-2:]
    side = 2 ** math.ceil(math.log2(max(h, w)))
    plasma = plasma_fractal(draws.uniform(side, side), decay)[:, None, :h, :w]
    largest = x_bchw.amax((1, 2, 3), keepdim=True)
    thicker: Tensor = x_bchw + thickness * plasma
    return thicker.mul_(largest / (largest + thickness))


def plasma_fractal(draw_bnn: Tensor, decay: float) -> Tensor:
    """Heights by the diamond-square algorithm on a torus, brought to [0, 1], from as many uniform numbers, [B, n, n].

    At every step the middles of squares, then those of their sides, become the mean of their four neighbours plus noise
    in +-wibble^2, and the wibble, 100 at first, is divided by `decay`. A point's noise is the draw at its place.
    """
    n = draw_bnn.shape[-1]
    noise = draw_bnn.double().mul_(2).sub_(1)
    heights = torch.zeros_like(noise)
    step, wibble = n, 100.0
    while step >= 2:
        half = step // 2
        corners, middles = heights[:, ::step, ::step], heights[:, half::step, half::step]
        tops, lefts = heights[:, ::step, half::step], heights[:, half::step, ::step]
        below = corners + corners.roll(-1, 1)
        middles[:] = (below + below.roll(-1, 2)) / 4 + wibble**2 * noise[:, half::step, half::step]
        across = corners + corners.roll(-1, 2)
        tops[:] = (middles + middles.roll(1, 1) + across) / 4 + wibble**2 * noise[:, ::step, half::step]
        along = corners + corners.roll(-1, 1)
        lefts[:] = (middles + middles.roll(1, 2) + along) / 4 + wibble**2 * noise[:, half::step, ::step]
        step, wibble = half, wibble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights.div_(heights.amax((1, 2), keepdim=True)).float()
