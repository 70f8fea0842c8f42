"""Formulas of changed images: attacks, noise of one band of frequencies, occlusion, corruptions, CutMix on patches.

Images are [B, C, H, W] in [0, 1]; a model takes them as they are, so that normalization belongs inside it.
Shapes: B images, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitclinic.data import augment, corruptions
from vitclinic.data.corruptions.noise import Ball, Norm
from vitclinic.functional.checks import check_labels, check_same, check_shape, widen
from vitclinic.probes.behaviour import attacks, frequency_noise, occlusion

Model = Callable[[Tensor], Any]


def attack_step(
    images: Tensor, current: Tensor, gradient: Tensor, epsilon: float, step: float, norm: Norm = "linf"
) -> Tensor:
    """Take one step towards a higher loss, within epsilon of the original images and within [0, 1].

        x <- clip_{epsilon, [0, 1]}(x + step * d),   d = sign(g) in l_inf, g / |g| in l_2

    Args:
        images: The originals, [B, C, H, W] in [0, 1].
        current: Where the attack is: the originals, or a random start in the ball.
        gradient: Of the loss in the images at `current`; not finite: the pixel stays.
        epsilon: Largest change in `norm`.
        step: Length of the step.
        norm: "linf" or "l2".

    References:
        Goodfellow et al. 2015; Madry et al. 2018; Wong et al. 2020 (step 1.25 epsilon from a random start);
        chen2022 App. B.

    Example:
        >>> x = torch.full((1, 1, 1, 2), 0.5)
        >>> attack_step(x, x, torch.tensor([[[[2.0, -3.0]]]]), epsilon=0.1, step=0.2)
        tensor([[[[0.6000, 0.4000]]]])
    """
    check_shape(images, "B C H W", "images")
    check_same(images, current, "images and where the attack is")
    check_same(images, gradient, "images and gradient")
    ball = _ball(norm, epsilon)
    return ball.nearest(images, current + step * ball.steepest(gradient))


def fgsm(model: Model, images: Tensor, targets: Tensor, epsilon: float = 2 / 255, norm: Norm = "linf") -> Tensor:
    """Attack images with the fast gradient sign method: one step of length epsilon.

    Args:
        model: Takes images in [0, 1], normalizes them itself and returns logits; put it in evaluation mode.
        images: [B, C, H, W] in [0, 1].
        targets: Class indices [B].
        epsilon: Largest change in `norm`.
        norm: "linf" or "l2".

    References:
        Goodfellow et al., ICLR 2015; hyeonwoo2023 Table 8.

    Example:
        >>> def model(x):  # its second class is for a light first pixel
        ...     return torch.stack([0 * x[:, 0, 0, 0], x[:, 0, 0, 0]], 1)
        >>> fgsm(model, torch.full((1, 1, 1, 2), 0.5), torch.tensor([0]), epsilon=0.1)
        tensor([[[[0.6000, 0.5000]]]])
    """
    return pgd(model, images, targets, epsilon, step=epsilon, steps=1, norm=norm)


def pgd(
    model: Model,
    images: Tensor,
    targets: Tensor,
    epsilon: float = 2 / 255,
    step: float = 0.25 / 255,
    steps: int = 10,
    norm: Norm = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """Attack images with projected gradient descent: `steps` times `attack_step`.

    Args:
        model: Takes images in [0, 1], normalizes them itself and returns logits; put it in evaluation mode.
        images: [B, C, H, W] in [0, 1].
        targets: Class indices [B].
        epsilon: Largest change in `norm`.
        step: Length of a step.
        steps: How many.
        norm: "linf" or "l2".
        start: What to add to the images before the first step, such as noise in the ball.

    References:
        Madry et al., ICLR 2018; chen2022 App. B (PGD-10).

    Example:
        >>> def model(x):
        ...     return torch.stack([0 * x[:, 0, 0, 0], x[:, 0, 0, 0]], 1)
        >>> pgd(model, torch.full((1, 1, 1, 2), 0.5), torch.tensor([0]), epsilon=0.1, step=0.04, steps=3)
        tensor([[[[0.6000, 0.5000]]]])
    """
    check_shape(images, "B C H W", "images")
    check_labels(targets, len(images), "targets")
    return attacks.Attack(_ball(norm, epsilon), steps, step)(model, images, targets, start)[0]


def _ball(norm: Norm, epsilon: float) -> Ball:
    if norm not in ("linf", "l2") or not epsilon >= 0:
        raise ValueError(f"norm must be 'linf' or 'l2' and epsilon not negative (got {norm!r} and {epsilon}).")
    return Ball(norm, epsilon)


def frequency_rings(size: tuple[int, int], width: float = 0.1) -> Tensor:
    """Return the ring index of each frequency of an image's FFT2: r for distances in [r, r + 1) * width * pi.

    Args:
        size: Height and width of the images.
        width: Of a ring, in pi.

    Returns:
        Integers [H, W], in the order of `torch.fft.fft2`.

    References:
        park2022 Fig. 2b.

    Example:
        >>> frequency_rings((1, 4), width=0.5).tolist()
        [[0, 1, 2, 1]]
    """
    if not width > 0:
        raise ValueError(f"width must be above 0 (got {width}).")
    return torch.from_numpy(frequency_noise.rings(*size, width))


def band_noise(noise: Tensor, mask: Tensor) -> Tensor:
    """Filter noise to a band of frequencies, scaled to a root mean square of 1 per image.

        a F^-1( F(delta) * M_f ),   a such that every band is as strong

    Args:
        noise: Gaussian delta, [B, C, H, W].
        mask: Booleans [H, W], symmetric: `frequency_rings(size) == r`.

    Returns:
        [B, C, H, W]; add `strength` times it to the images.

    References:
        park2022 Fig. 2b; the scale is ours: a ring's energy grows with its area.

    Example:
        >>> ring = frequency_rings((8, 8)) == 5
        >>> band_noise(torch.randn(2, 3, 8, 8), ring).square().mean((1, 2, 3)).round().tolist()
        [1.0, 1.0]
    """
    check_shape(noise, "B C H W", "noise")
    if mask.shape != noise.shape[2:]:
        raise ValueError(
            f"the mask must have the shape of the noise, {tuple(noise.shape[2:])} (got {tuple(mask.shape)})."
        )
    return frequency_noise.unit_noise(widen(noise), mask)


def occlude_center(images: Tensor, color: float | Sequence[float] | Tensor = 0.0) -> Tensor:
    """Cover the central square of half the height and width with one color: 112 x 112 of 224 x 224.

    Args:
        images: [B, C, H, W].
        color: One number, or one a channel.

    References:
        hyeonwoo2023 Table 8.

    Example:
        >>> occlude_center(torch.ones(1, 1, 4, 4))[0, 0, 1]
        tensor([1., 0., 0., 1.])
    """
    check_shape(images, "B C H W", "images")
    return occlusion.occlude(images, torch.as_tensor(color).expand(images.shape[1]))


def corrupt(images: Tensor, name: str, severity: int, indices: Sequence[int] | None = None, seed: int = 0) -> Tensor:
    """Apply one of the 19 corruptions of ImageNet-C.

    Args:
        images: [B, 1 or 3, H, W] in [0, 1], at least 32 x 32.
        name: Such as "fog"; docs/corrupt.md lists them.
        severity: 1 to 5.
        indices: What makes an image's random numbers its own; its place in the batch unless given.
        seed: Of the random numbers.

    References:
        Hendrycks & Dietterich, ICLR 2019.

    Example:
        >>> corrupt(torch.rand(2, 3, 32, 32), "fog", severity=3).shape
        torch.Size([2, 3, 32, 32])
    """
    check_shape(images, "B C H W", "images")
    return corruptions.corrupt(images, name, severity, indices, seed)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Convert labels to soft targets, with `smoothing` spread evenly over all classes.

    Args:
        labels: Class indices [B].
        num_classes: K.
        smoothing: Between 0 and 1.

    Returns:
        [B, K].

    Example:
        >>> soft_targets(torch.tensor([1]), 2, smoothing=0.2)
        tensor([[0.1000, 0.9000]])
    """
    check_labels(labels, len(labels), "labels")
    return augment.soft_targets(labels, num_classes, smoothing)


def patch_cutmix(images: Tensor, targets: Tensor, partner: Tensor, cut: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mix images by CutMix on patch borders; return them with a target for each image and for each patch.

    An image's target is lambda y_i + (1 - lambda) y_j, lambda being the share of its patches that are its own.

    Args:
        images: [B, C, H, W], H and W multiples of the grid's rows and columns.
        targets: Shares of the classes, [B, K]; see `soft_targets`.
        partner: Which image each is mixed with, [B].
        cut: Booleans [B, rows, columns]: the patches that show the partner.

    Returns:
        Mixed images [B, C, H, W], targets [B, K] and patch targets [B, N, K].

    References:
        gong2021 Sec. 4; Yun et al., ICCV 2019 (CutMix).

    Example:
        >>> images = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
        >>> cut = torch.tensor([[[True, False], [False, False]], [[False, False], [False, False]]])
        >>> mixed, targets, patches = patch_cutmix(images, torch.eye(2), torch.tensor([1, 0]), cut)
        >>> mixed[0, 0].tolist(), targets[0].tolist(), patches[0, 0].tolist()
        ([[1.0, 0.0], [0.0, 0.0]], [0.75, 0.25], [0.0, 1.0])
    """
    check_shape(images, "B C H W", "images")
    check_shape(targets, "B K", "targets")
    check_labels(partner, len(images), "partner")
    if cut.ndim != 3 or len(cut) != len(images) or len(targets) != len(images):
        raise ValueError(f"cut must be [B, rows, columns] for {len(images)} images (got {tuple(cut.shape)}).")
    if images.shape[2] % cut.shape[1] or images.shape[3] % cut.shape[2]:
        raise ValueError(f"images of {tuple(images.shape[2:])} do not divide into {tuple(cut.shape[1:])} patches.")
    return augment.mix_cells(images, targets, partner, cut.bool())
