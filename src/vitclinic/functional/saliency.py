"""Formulas of saliency maps, and of what they are worth: rollout, Grad-CAM, deletion and insertion.

Shapes: B images, H heads, N tokens, C channels, h x w the grid of a map, K classes, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitclinic.functional.checks import check_attention, check_labels, check_same, check_shape, widen
from vitclinic.probes.behaviour import saliency_maps
from vitclinic.probes.output import read_output

Model = Callable[[Tensor], Any]


def attention_rollout(attention: Sequence[Tensor]) -> Tensor:
    """Return the product of the attention of all layers, residuals included.

        R = A_L ... A_1,   A_l = (I + mean over heads of the attention of layer l) / 2

    Args:
        attention: Weights of each layer, the first one first, [B, H, N, N].

    Returns:
        [B, N, N]: row i says from which inputs token i was mixed in the end, and sums to 1.

    References:
        Abnar and Zuidema 2020.

    Example:
        >>> attention_rollout([torch.full((1, 2, 2, 2), 0.5)])[0]
        tensor([[0.7500, 0.2500],
                [0.2500, 0.7500]])
    """
    _check_layers(attention)
    return saliency_maps.attention_rollout([widen(one) for one in attention])


def gradient_rollout(attention: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return the relevance of each token for each token, from attention weighted with the gradient of a class.

        R <- R + mean over heads of max(0, dy/dA_l * A_l) R,   R = I before the first layer

    Args:
        attention: Weights of each layer, the first one first, [B, H, N, N].
        gradients: Derivatives of the score y of a class in these weights.

    Returns:
        [B, N, N]; the row of the class token, without itself, is a map of the patches.

    References:
        Chefer et al., ICCV 2021, Eq. 5, 6.

    Example:
        >>> gradient_rollout([torch.full((1, 1, 2, 2), 0.5)], [torch.tensor([[[[0.0, 2.0], [-1.0, 0.0]]]])])[0]
        tensor([[1., 1.],
                [0., 1.]])
    """
    _check_layers(attention)
    for one, gradient in zip(attention, gradients, strict=True):
        check_same(one, gradient, "attention and its gradient")
    return saliency_maps.gradient_rollout([widen(one) for one in attention], [widen(one) for one in gradients])


def grad_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Return Grad-CAM: the positive part of the feature maps, weighted by the mean gradient of each channel.

        max(0, sum_c a_c A_c),   a_c = mean over positions of dy/dA_c

    Args:
        maps: Feature maps [B, C, h, w]; tokens [B, N, D] become maps by `h.transpose(1, 2).unflatten(2, grid)`.
        gradient: Derivatives of the score y of a class in them.

    Returns:
        [B, h, w].

    References:
        Selvaraju et al., ICCV 2017.

    Example:
        >>> grad_cam(torch.tensor([[[[1.0, -3.0]]]]), torch.ones(1, 1, 1, 2))
        tensor([[[1., 0.]]])
    """
    check_shape(maps, "B C h w", "feature maps")
    check_same(maps, gradient, "feature maps and their gradient")
    return saliency_maps.grad_cam(widen(maps), widen(gradient))


def deletion_curve(model: Model, images: Tensor, classes: Tensor, maps: Tensor, steps: int = 16) -> Tensor:
    """Return the probability of a class as pixels become the mean colour of their image, the most salient first.

    Args:
        model: From images to logits [B, K].
        images: [B, C, H, W].
        classes: The class of each image, [B].
        maps: Saliency [B, h, w], resized to the image bilinearly.
        steps: Number of steps S.

    Returns:
        [B, S + 1] in float64; the score is the area below it, `torch.trapezoid(curve, dx=1 / steps)`: lower is better.

    References:
        Petsiuk et al. 2018 (RISE), Sec. 4.

    Example:
        >>> images = torch.tensor([[[[1.0, 0.0]]]])
        >>> model = lambda x: torch.stack([8 * x[:, 0, 0, 0], 0 * x[:, 0, 0, 0]], 1)  # looks at the first pixel
        >>> deletion_curve(model, images, torch.tensor([0]), torch.tensor([[[1.0, 0.0]]]), steps=2)[0]
        tensor([0.9997, 0.9820, 0.9820], dtype=torch.float64)
    """
    return _curve(saliency_maps.deletion_curve, model, images, classes, maps, steps)


def insertion_curve(model: Model, images: Tensor, classes: Tensor, maps: Tensor, steps: int = 16) -> Tensor:
    """Return the probability of a class as pixels of a blurred image become those of the image, most salient first.

    Args:
        model: From images to logits [B, K].
        images: [B, C, H, W].
        classes: The class of each image, [B].
        maps: Saliency [B, h, w], resized to the image bilinearly.
        steps: Number of steps S.

    Returns:
        [B, S + 1] in float64; the score is the area below it: higher is better.

    References:
        Petsiuk et al. 2018 (RISE), Sec. 4. The blur is a Gaussian of a tenth of the shorter side.

    Example:
        >>> images = torch.rand(1, 1, 8, 8)
        >>> model = lambda x: x.flatten(1)[:, :2]
        >>> insertion_curve(model, images, torch.tensor([0]), torch.rand(1, 2, 2), steps=4).shape
        torch.Size([1, 5])
    """
    return _curve(saliency_maps.insertion_curve, model, images, classes, maps, steps)


def _curve(
    curve: Callable[..., Tensor], model: Model, images: Tensor, classes: Tensor, maps: Tensor, steps: int
) -> Tensor:
    check_shape(images, "B C H W", "images")
    check_shape(maps, "B h w", "saliency maps")
    check_labels(classes, len(images), "classes")
    if len(maps) != len(images) or steps < 1:
        raise ValueError(f"there must be a map for each image and a step (got {len(maps)} maps, {steps} steps).")

    def probability(changed: Tensor) -> Tensor:
        return read_output(model(changed)).double().softmax(1).gather(1, classes[:, None])[:, 0]

    with torch.no_grad():
        resized = saliency_maps.resize(maps.double(), (images.shape[2], images.shape[3]))
        return curve(probability, images, resized, steps)


def _check_layers(attention: Sequence[Tensor]) -> None:
    if not attention:
        raise ValueError("there is no attention: give the weights of at least one layer.")
    for one in attention:
        check_attention(one)
        if one.shape[2] != one.shape[3] or one.shape[0] != attention[0].shape[0]:
            raise ValueError(f"attention must be [B, H, N, N] in all layers (got {tuple(one.shape)}).")
