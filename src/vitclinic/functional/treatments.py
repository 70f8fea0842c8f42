"""Formulas of the remedies: scaled ReLU, Context Broadcasting, mimetic factors, pooling, registers, patch losses.

All of them can be differentiated.
Shapes: B images, N tokens, D channels, K classes, C channels of a map of H x W places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitclinic.functional.checks import check_same, check_shape
from vitclinic.treatments import context_broadcasting as broadcasting
from vitclinic.treatments import mimetic_init as mimetic
from vitclinic.treatments import patch_losses
from vitclinic.treatments import registers as register_tokens
from vitclinic.treatments import sequence_pooling as pooling
from vitclinic.treatments import spatial_smoothing as smoothing
from vitclinic.treatments import squeeze_excitation as gating


def scaled_relu(x: Tensor, shift: float | Tensor = 0.0, scale: float | Tensor = 1.0) -> Tensor:
    """Return ReLU_{a,b}(x) = b max(x + a, 0).

    ReLU behind BatchNorm with scale b > 0 and shift s is ReLU_{s/b, b} of the normalized input.

    Args:
        x: Any shape.
        shift: a, one number or a tensor that broadcasts against x.
        scale: b.

    References:
        wang2022 Eq. 1.

    Example:
        >>> scaled_relu(torch.tensor([-2.0, 0.0, 1.0]), shift=1.0, scale=3.0)
        tensor([0., 3., 6.])
    """
    return scale * torch.clamp(x + shift, min=0)


def context_broadcasting(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Mix the mean of all tokens into every token (Context Broadcasting).

        CB(x_i)   = (x_i + mean_j x_j) / 2
        CB_S(x_i) = x_i + Lambda * mean_j x_j

    Args:
        x: All tokens, CLS included, [B, N, D]; or a grid [B, H, W, D].
        scale: Lambda [D], one for each block, learned; CB without it.

    Returns:
        As x, in its dtype.

    References:
        hyeonwoo2023 Eq. 1, Sec. 3.2.

    Example:
        >>> context_broadcasting(torch.tensor([[[0.0], [4.0]]])).flatten().tolist()
        [1.0, 3.0]
        >>> context_broadcasting(torch.tensor([[[0.0], [4.0]]]), torch.tensor([0.5])).flatten().tolist()
        [1.0, 5.0]
    """
    if x.ndim != 4:
        check_shape(x, "B N D", "tokens")
    if scale is not None and scale.shape != x.shape[-1:]:
        raise ValueError(f"scale must be [{x.shape[-1]}], one per channel (got {tuple(scale.shape)}).")
    return broadcasting.broadcast_context(x, scale)


def squeeze_excitation(x: Tensor, squeeze: Tensor, excite: Tensor) -> Tensor:
    """Gate the channels of the tokens by the mean of all tokens (Squeeze-and-Excitation).

        x_i * sigmoid(W2 relu(W1 mean_j x_j))

    Args:
        x: All tokens, [B, N, D]; or a grid [B, H, W, D].
        squeeze: W1, [D / r, D].
        excite: W2, [D, D / r].

    References:
        Hu et al., CVPR 2018, Eq. 2-4; hyeonwoo2023 Table 3.

    Example:
        >>> squeeze_excitation(torch.ones(1, 2, 4), torch.zeros(1, 4), torch.zeros(4, 1))[0, 0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if x.ndim != 4:
        check_shape(x, "B N D", "tokens")
    if squeeze.shape != excite.shape[::-1] or excite.shape[0] != x.shape[-1]:
        raise ValueError(f"W1 must be [D/r, D] and W2 [D, D/r] (got {tuple(squeeze.shape)}, {tuple(excite.shape)}).")
    return gating.squeeze_and_excite(x, squeeze, excite)


def mimetic_factors(noise: Tensor, rank: int, alpha: float = 0.7, beta: float = 0.7) -> tuple[Tensor, Tensor]:
    """Split alpha Z + beta I into two factors, as mimetic initialization does for the weights of attention.

        alpha Z + beta I = U S V^T,   L = U_k S_k^1/2,   R = V_k S_k^1/2,   so that L R^T is near it

    W_Q = L and W_K = R for each head, with k channels; with alpha 0.4, beta -0.4 and k = D, W_V = L and W_proj = R^T.

    Args:
        noise: Z, [D, D], of standard deviation 1 / sqrt(D).
        rank: k, at most D.
        alpha: The weight of the noise.
        beta: The weight of the identity.

    Returns:
        L and R, [D, k] each.

    References:
        Trockman & Kolter 2023.

    Example:
        >>> left, right = mimetic_factors(torch.zeros(3, 3), rank=3, beta=0.5)
        >>> (left @ right.T).diagonal()
        tensor([0.5000, 0.5000, 0.5000])
    """
    check_shape(noise, "D D", "noise")
    if noise.shape[0] != noise.shape[1] or not 1 <= rank <= len(noise):
        raise ValueError(f"noise must be square and rank at most its side (got {tuple(noise.shape)}, {rank}).")
    return mimetic.mimetic_factors(noise, rank, alpha, beta)


def convolution_factors(positions: Tensor, scores: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return query and key weights whose scores on the position embedding are near given ones, up to a factor.

        P = LN(positions) = U S V^T,   P^+ = V_k S_k^-1 U_k^T,   P^+ scores P^+T = L R^T,
        W_Q = 7 L / norm(L),   W_K = 7 R / norm(R)

    Args:
        positions: [N, D], one for each patch.
        scores: [N, N], as of a head that attends to the patch on its left: large there, small elsewhere.
        rank: k, the channels of a head.

    Returns:
        W_Q and W_K, [D, k] each; fewer columns if P has a lower rank than k.

    References:
        Zheng et al. 2025 (their code, in closed form).

    Example:
        >>> query, key = convolution_factors(torch.eye(4), 1000.0 * torch.eye(4), rank=3)
        >>> query.shape, round(query.norm().item(), 3)
        (torch.Size([4, 3]), 7.0)
    """
    check_shape(positions, "N D", "positions")
    check_shape(scores, "N N", "scores")
    if scores.shape != (len(positions),) * 2 or not 1 <= rank <= positions.shape[1]:
        raise ValueError(f"scores must be [{len(positions)}, {len(positions)}] and rank at most {positions.shape[1]}.")
    return mimetic.convolution_factors(positions, scores, rank)


def sequence_pool(x: Tensor, weight: Tensor) -> Tensor:
    """Pool tokens by a learned weighted mean (sequence pooling).

        z = sum_i w_i x_i,   w = softmax over i of x_i . g

    Args:
        x: The tokens to pool, [B, N, D].
        weight: g, [D]; zeros give the mean.

    Returns:
        [B, D].

    References:
        Hassani et al. 2021, SeqPool.

    Example:
        >>> sequence_pool(torch.tensor([[[0.0], [4.0]]]), torch.zeros(1))
        tensor([[2.]])
    """
    check_shape(x, "B N D", "tokens")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], one per channel (got {tuple(weight.shape)}).")
    return pooling.pool_sequence(x, weight)


def insert_registers(x: Tensor, registers: Tensor, prefix: int = 1) -> Tensor:
    """Put register tokens between the prefix tokens and the patches of each image.

    Args:
        x: All tokens, [B, N, D].
        registers: [R, D], the same for all images.
        prefix: How many tokens, such as CLS, stand before the patches.

    Returns:
        [B, N + R, D]; `remove_registers` undoes it.

    References:
        Darcet et al. 2024, Sec. 3.

    Example:
        >>> insert_registers(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[9.0]])).flatten().tolist()
        [1.0, 9.0, 2.0]
    """
    check_shape(x, "B N D", "tokens")
    check_shape(registers, "R D", "registers")
    if registers.shape[1] != x.shape[2] or not 0 <= prefix <= x.shape[1]:
        raise ValueError(
            f"registers must be [R, {x.shape[2]}] and come after at most {x.shape[1]} tokens"
            f" (got {tuple(registers.shape)} after {prefix})."
        )
    return register_tokens.insert_registers(x, registers, prefix)


def remove_registers(x: Tensor, count: int, prefix: int = 1) -> Tensor:
    """Drop the register tokens between the prefix tokens and the patches of each image.

    Args:
        x: All tokens, [B, N, D].
        count: Number of registers, R.
        prefix: How many tokens, such as CLS, stand before the registers.

    Returns:
        [B, N - R, D].

    References:
        Darcet et al. 2024, Sec. 3.

    Example:
        >>> remove_registers(torch.tensor([[[1.0], [9.0], [2.0]]]), count=1).flatten().tolist()
        [1.0, 2.0]
    """
    check_shape(x, "B N D", "tokens")
    if count < 0 or prefix < 0 or prefix + count > x.shape[1]:
        raise ValueError(f"there are {x.shape[1]} tokens, fewer than {prefix} and {count} registers.")
    return register_tokens.remove_registers(x, count, prefix)


def spatial_smoothing(maps: Tensor) -> Tensor:
    """Blur feature maps with a 2 x 2 mean of stride 1; the last row and column are repeated, so the size stays.

    Args:
        maps: [B, C, H, W].

    References:
        park2022 Fig. 3a, App. B.

    Example:
        >>> spatial_smoothing(torch.tensor([[[[0.0, 4.0], [8.0, 0.0]]]]))
        tensor([[[[3., 2.],
                  [4., 0.]]]])
    """
    check_shape(maps, "B C H W", "feature maps")
    return smoothing.blur(maps)


def patch_cosine_loss(h: Tensor) -> Tensor:
    """Return the mean absolute cosine between different patches of an image, averaged over images.

        1/(n (n-1)) sum_{i != j} |h_i . h_j| / (|h_i| |h_j|)

    As a measurement, patch by patch that is zero left out, it is `patch_similarity(h, absolute=True)`.

    Args:
        h: Last-layer patches without prefix tokens, [B, N, D].

    Returns:
        A scalar with a gradient.

    References:
        gong2021 Sec. 4.

    Example:
        >>> patches = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]])
        >>> patch_cosine_loss(patches)  # one of the three pairs is parallel
        tensor(0.3333)
    """
    _check_patches(h)
    return patch_losses.cosine_loss(h)


def patch_contrastive_loss(first: Tensor, last: Tensor, normalize: bool = False) -> Tensor:
    """Return the loss that ties each last-layer patch to its own first-layer patch.

        -1/n sum_i log[ exp(h1_i . hL_i) / (exp(h1_i . hL_i) + exp(h1_i . mean_{j != i} hL_j)) ]

    computed as softplus(h1_i . (mean_{j != i} hL_j - hL_i)), which cannot overflow; no gradient goes into `first`.

    Args:
        first: Patch embeddings that enter the first layer, [B, N, D].
        last: Patches of the last layer, [B, N, D].
        normalize: Make every vector's length 1 before; the paper's are raw.

    References:
        gong2021 Sec. 4.

    Example:
        >>> patch_contrastive_loss(torch.eye(2)[None], torch.ones(1, 2, 2))  # all are the same: log 2
        tensor(0.6931)
    """
    _check_patches(last)
    check_same(first, last, "first and last patches")
    return patch_losses.contrastive_loss(first, last, normalize)


def patch_mixing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every patch's prediction with the patch's own target, averaged.

        1/n sum_i CE(g(h_i), y_i)

    Args:
        logits: Predictions of a linear head that all patches share, [B, N, K].
        targets: Shares of the classes, [B, N, K], as from `patch_cutmix`.

    References:
        gong2021 Sec. 4.

    Example:
        >>> patch_mixing_loss(torch.zeros(1, 2, 2), torch.eye(2)[None])
        tensor(0.6931)
    """
    check_shape(logits, "B N K", "predictions")
    check_same(logits, targets, "predictions and targets of patches")
    return patch_losses.mixing_loss(logits, targets)


def _check_patches(h: Tensor) -> None:
    check_shape(h, "B N D", "patches")
    if h.shape[1] < 2:
        raise ValueError("The patch losses need at least two patches.")
