"""Deletion and insertion: how the probability of a class changes as an image's pixels go, or come, in an order (RISE).

Shapes: B images, C channels, H x W pixels, S steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as transforms

Predict = Callable[[Tensor], Tensor]
"""From images [B, C, H, W] to the probability of each one's class, [B]."""

_BLUR = 0.1
"""Standard deviation of the blur, in shorter sides of the image."""


def resize(maps_bhw: Tensor, size: tuple[int, int]) -> Tensor:
    """Return maps on the pixels of an image, bilinearly."""
    return F.interpolate(maps_bhw[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def replacement_curve(predict: Predict, start: Tensor, end: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels of `start` become those of `end`, highest of the maps first, [B, S + 1].

    The maps are as large as the images. After step s, round(s H W / S) pixels are those of `end`; equal values keep the
    order of the pixels.
    """
    pixels = maps_bhw[0].numel()
    order = maps_bhw.flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks_bhw = order.argsort(dim=1).view_as(maps_bhw)
    counts = [round(step * pixels / steps) for step in range(steps + 1)]
    return torch.stack([predict(torch.where((ranks_bhw < count)[:, None], end, start)) for count in counts], dim=1)


def deletion_curve(predict: Predict, images: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels are replaced by the mean colour of their image, [B, S + 1]."""
    return replacement_curve(predict, images, images.mean((2, 3), keepdim=True).expand_as(images), maps_bhw, steps)


def insertion_curve(predict: Predict, images: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels of a blurred image become those of the image, [B, S + 1]."""
    return replacement_curve(predict, blur(images), images, maps_bhw, steps)


def blur(images: Tensor) -> Tensor:
    """Return images blurred by a Gaussian of a tenth of their shorter side, mirrored at the borders."""
    side = min(images.shape[2:])
    sigma = _BLUR * side
    reach = max(1, min(round(3 * sigma), side - 1))
    kernel = [2 * reach + 1] * 2
    blurred: Tensor = transforms.gaussian_blur(images, kernel, [sigma, sigma])
    return blurred


def area_under(curve: Tensor) -> Tensor:
    """Return the area under curves [B, S + 1] over the share of pixels, by trapezoids, [B]."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1))
