"""Formulas of representations: CKA, token similarity, Fourier analysis, variance, sparsity, norms.

Shapes: B images, N tokens, D channels of a token, C channels of a map of H x W places, F frequencies, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vitclinic.functional.checks import check_shape, widen
from vitclinic.probes import norms
from vitclinic.probes.features import cka as units
from vitclinic.probes.features import fourier, token_similarity
from vitclinic.probes.features import hsic as unbiased
from vitclinic.probes.features import token_norms as lengths
from vitclinic.probes.features.sparsity import active_share
from vitclinic.probes.features.variance import spatial_variance


def hsic(x: Tensor, y: Tensor) -> Tensor:
    """Return the unbiased HSIC of two sets of features, with linear kernels K = x x^T and L = y y^T.

        HSIC(K, L) = [tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2/(n-2) 1'KL1] / (n (n-3)),   diagonals of K, L set to 0

    It is 0 on average for independent features, and does not change when features are translated.

    Args:
        x: Features of n >= 4 images, [n, ...]; all axes behind the first are features.
        y: Features of the same images, [n, ...], in any number.

    Returns:
        A scalar in the dtype of x; computed in float64.

    References:
        Song et al., JMLR 2012; Nguyen et al., ICLR 2021; park2022 App. D.3.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [4.0]], dtype=torch.float64)
        >>> round(hsic(x, x).item(), 4)
        4.6667
    """
    return torch.as_tensor(_pair(x, y)[0, 1], device=x.device).to(widen(x).dtype)


def cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the unbiased linear CKA of two sets of features: 1 if they agree up to rotation and scale, else less.

        CKA(x, y) = HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y))

    Args:
        x: Features of n >= 4 images, [n, ...].
        y: Features of the same images, [n, ...].

    Returns:
        A scalar in [-1, 1] in the dtype of x; 0 where the features of all images are the same.

    References:
        Kornblith et al., ICML 2019; Nguyen et al., ICLR 2021; park2022 Fig. 10a, D.3.

    Example:
        >>> x = torch.randn(8, 5)
        >>> round(cka(x, 3 * x + 1).item(), 4)
        1.0
    """
    return torch.as_tensor(unbiased.ratio(_pair(x, y))[0, 1], device=x.device).to(widen(x).dtype)


def minibatch_cka(batches: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return the CKA of all pairs of layers; HSIC is averaged over mini-batches before taking the ratio.

    Args:
        batches: For each mini-batch the features [n, ...] of L layers; one of fewer than four images is left out.

    Returns:
        [L, L] in float64.

    Raises:
        ValueError: If no mini-batch has four images, or the number of layers changes.

    References:
        Nguyen et al., ICLR 2021; park2022 Fig. 10a, D.3.

    Example:
        >>> layers = [torch.eye(8), 2 * torch.eye(8), torch.eye(8)]
        >>> minibatch_cka([layers, layers]).shape
        torch.Size([3, 3])
    """
    return torch.from_numpy(unbiased.mini_batch_cka([x.detach() for x in layers] for layers in batches))


def _pair(x: Tensor, y: Tensor) -> unbiased.Matrix:
    """Return the HSIC of x and y with each other and themselves, [2, 2]."""
    for features in (x, y):
        if not isinstance(features, Tensor):
            raise ValueError(f"features must be tensors [n, ...] (got {type(features).__name__}).")
    if x.ndim < 2 or y.ndim < 2 or len(x) != len(y):
        raise ValueError(f"features must be [n, ...] of the same n images (got {tuple(x.shape)}, {tuple(y.shape)}).")
    grams = torch.stack([unbiased.gram(features).double().cpu() for features in (x.detach(), y.detach())])
    return unbiased.hsic(grams.numpy())


def patch_similarity(h: Tensor, absolute: bool = False) -> Tensor:
    """Return the mean cosine between two different tokens of each image.

        1 / (n (n-1)) sum_{i != j} h_i . h_j / (|h_i| |h_j|),   or of its absolute value

    over the n tokens of an image that are not zero. Leave prefix tokens such as CLS out.

    Args:
        h: Tokens [B, N, D].
        absolute: Take absolute values of the cosines [gong2021] instead of signed ones [wang2022 Eq. 5].

    Returns:
        [B] in the dtype of h; NaN where an image has fewer than two tokens that are not zero.

    References:
        gong2021 Sec. 3 (absolute); wang2022 Eq. 5 (signed).

    Example:
        >>> h = torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]])
        >>> [round(patch_similarity(h, absolute).item(), 4) for absolute in (False, True)]
        [-0.3333, 0.3333]
    """
    check_shape(h, "B N D", "tokens")
    tokens = token_similarity.directions(h)
    found = token_similarity.absolute_cosine(tokens) if absolute else token_similarity.cosine(tokens)
    return found.to(widen(h).dtype)


def token_norms(h: Tensor) -> Tensor:
    """Return the l2 norm of each token of [B, N, D], as [B, N] in float64 (Darcet et al. 2024, Fig. 3).

    Args:
        h: [B, N, D], the tokens.

    Example:
        >>> token_norms(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])).tolist()
        [[5.0, 0.0]]
    """
    check_shape(h, "B N D", "tokens")
    return lengths.token_norms(h.transpose(1, 2)[..., None])[..., 0]


def outlier_tokens(norms: Tensor, ratio: float = 3.0, score: float = 3.5) -> Tensor:
    """Return which tokens have a norm far above that of the other tokens of their image.

        log |h_i| - m > max(log ratio, score * 1.4826 MAD),   m = median_j log |h_j|,   MAD = median_j |log |h_j| - m|

    Tokens that are zero count in neither median, and are no outliers. Leave prefix tokens such as CLS out.

    Args:
        norms: Norms of the tokens of each image, [B, N], as from `token_norms`.
        ratio: How many times the median norm an outlier has at least.
        score: How many robust standard deviations of the log norms it lies above the median at least.

    Returns:
        Booleans [B, N].

    References:
        Darcet et al. 2024, Sec. 2; Iglewicz and Hoaglin 1993 (3.5 robust standard deviations).

    Example:
        >>> outlier_tokens(torch.tensor([[1.0, 1.1, 0.9, 1.0, 10.0]])).tolist()
        [[False, False, False, False, True]]
    """
    check_shape(norms, "B N", "norms of tokens")
    if ratio <= 1 or score < 0:
        raise ValueError(f"ratio must be above 1 and score not below 0 (got {ratio:g} and {score:g}).")
    return lengths.find_outliers(norms, ratio, score)


def fourier_log_amplitude(maps: Tensor) -> Tensor:
    """Return log |FFT2| of feature maps along the half-diagonal of the spectrum, averaged over channels.

    Args:
        maps: Feature maps [B, C, H, W]; tokens [B, N, D] become maps by `h.transpose(1, 2).unflatten(2, grid)`.

    Returns:
        [B, F] at the frequencies `fourier_frequencies((H, W))`, from 0 to pi; amplitudes below 1e-6 count as 1e-6.

    References:
        park2022 Fig. 2a, 8, App. D.2.

    Example:
        >>> checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # all at frequency pi, on top of a mean
        >>> fourier_log_amplitude(0.5 + checkerboard.expand(1, 3, 2, 2)).exp()
        tensor([[2., 4.]])
    """
    check_shape(maps, "B C H W", "feature maps")
    return fourier.log_amplitude(widen(maps))


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """Return the log amplitude of feature maps relative to that at frequency 0 (Delta log amplitude).

    Its last column, at frequency pi, is what a unit is known by; across a unit it falls if the unit is a low-pass
    filter and rises if it is a high-pass filter.

    Args:
        maps: Feature maps [B, C, H, W].

    Returns:
        [B, F], the first column 0.

    References:
        park2022 Fig. 2a, 8, App. D.2.

    Example:
        >>> checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> relative_log_amplitude(0.5 + checkerboard.expand(1, 3, 2, 2))
        tensor([[0.0000, 0.6931]])
    """
    check_shape(maps, "B C H W", "feature maps")
    return fourier.relative_log_amplitude(widen(maps))


def fourier_frequencies(size: tuple[int, int]) -> Tensor:
    """Return the frequencies of the half-diagonal for H x W maps, in units of pi: [F] from 0 to 1.

    Args:
        size: Height and width of the maps.

    Example:
        >>> fourier_frequencies((4, 4)).tolist()
        [0.0, 0.5, 1.0]
    """
    return torch.from_numpy(fourier.half_diagonal(size).frequencies.copy())


def feature_variance(maps: Tensor) -> Tensor:
    """Return the variance of feature maps over positions, averaged over channels.

        1/C sum_c 1/(HW - 1) sum_p (x_cp - mean_p x_cp)^2

    Args:
        maps: Feature maps [B, C, H, W] of more than one place.

    Returns:
        [B].

    References:
        park2022 Fig. 9, App. D.1.

    Example:
        >>> checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> feature_variance(checkerboard.expand(1, 3, 2, 2))  # 4 / 3
        tensor([1.3333])
    """
    check_shape(maps, "B C H W", "feature maps")
    if maps.shape[2] * maps.shape[3] < 2:
        raise ValueError("feature maps of a single position have no variance over positions.")
    return spatial_variance(widen(maps))


def active_neurons(activation: Tensor) -> Tensor:
    """Return the share of values above zero after an activation function, for each image.

    Args:
        activation: [B, ...], such as the hidden values [B, N, 4 D] of an MLP.

    Returns:
        [B] in float32; NaN where a value is not finite.

    References:
        chen2022 Fig. 2.

    Example:
        >>> active_neurons(torch.tensor([[1.0, -0.1, 0.0, 2.0]]))
        tensor([0.5000])
    """
    if activation.ndim < 2:
        raise ValueError(f"activations must be [B, ...] (got {tuple(activation.shape)}).")
    return active_share(activation)


def sparsity(activation: Tensor) -> Tensor:
    """Return the share of values after an activation function that are not above zero: 1 - active neurons.

    Args:
        activation: [B, ...].

    Returns:
        [B] in float32.

    References:
        chen2022 Fig. 2.

    Example:
        >>> sparsity(torch.tensor([[1.0, -0.1, 0.0, -2.0]]))
        tensor([0.7500])
    """
    return 1 - active_neurons(activation)


def activation_norm(activation: Tensor) -> Tensor:
    """Return |a|_2 for each image, over all tokens (or positions) and channels.

    Args:
        activation: [B, ...].

    Returns:
        [B] in float64.

    References:
        chen2022 Table 4.

    Example:
        >>> activation_norm(torch.tensor([[3.0, 4.0]])).item()
        5.0
    """
    if activation.ndim < 2:
        raise ValueError(f"activations must be [B, ...] (got {tuple(activation.shape)}).")
    return norms.activation_norm(activation)


def weight_norm(params: Iterable[Tensor]) -> float:
    """Return |w|_2 over all parameters together, summed in float64.

    Args:
        params: The parameters, of any shapes.

    References:
        chen2022 Table 4.

    Example:
        >>> weight_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        5.0
    """
    return norms.weight_norm(params)


def block_structure(cka: Tensor, stages: Sequence[int]) -> float:
    """Return how much more similar layers within a stage are than equally distant layers of different stages.

    The mean CKA of pairs within a stage less that of pairs across stages, at each distance in depth at which there are
    both, averaged over the distances; 0 for a single stage.

    Args:
        cka: [L, L], such as `minibatch_cka` returns.
        stages: The stage of each layer.

    References:
        park2022 Fig. 10a describes it; the number is ours.

    Example:
        >>> two_blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
        >>> block_structure(two_blocks, [0, 0, 1, 1])
        1.0
    """
    check_shape(cka, "L L", "the CKA of all pairs of layers")
    if cka.shape != (len(stages), len(stages)):
        raise ValueError(f"{len(stages)} stages need a CKA of as many layers (got {tuple(cka.shape)}).")
    return units.block_structure(np.asarray(cka.detach().double().cpu()), stages)
