"""Formulas of attention: entropy, distance and maps of its weights, and other kinds of attention.

Shapes: B images, H heads, Q queries, K keys, D channels of a head; N = P + h * w tokens, of which P are prefix tokens
(CLS) and h x w is the grid of patches.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf

from vitclinic.functional.checks import check_attention, check_grid, check_shape, widen
from vitclinic.probes.attention import distance, entropy, maps, softmax_jacobian
from vitclinic.probes.attention.cb_scale import quantile_ratio
from vitclinic.treatments import attention_edit, neighbourhood, uniform_heads


def attention_entropy(attention: Tensor) -> Tensor:
    """Return the entropy of each query's attention, between 0 (one key) and log K (uniform).

        -sum_j a_ij log a_ij,   natural logarithm

    Args:
        attention: Weights behind the softmax, [B, H, Q, K]; rows of half precision are made to sum to 1 again.

    Returns:
        [B, H, Q] in the dtype of the weights, half precision as float32.

    References:
        hyeonwoo2023 Fig. 4, 7a.

    Example:
        >>> attention_entropy(torch.tensor([[[[0.5, 0.5], [1.0, 0.0]]]]))
        tensor([[[0.6931, 0.0000]]])
    """
    check_attention(attention)
    return entropy.row_entropy(attention)


def upper_attention_entropy(attention: Tensor) -> Tensor:
    """Return the 85th percentile of attention entropy over each image's heads and queries.

    Args:
        attention: [B, H, Q, K].

    Returns:
        [B] in float64.

    References:
        hyeonwoo2023 Fig. 4.

    Example:
        >>> upper_attention_entropy(torch.full((1, 2, 4, 4), 0.25))  # log 4
        tensor([1.3863], dtype=torch.float64)
    """
    values = attention_entropy(attention.detach()).double().cpu().numpy()
    return torch.from_numpy(np.percentile(values.reshape(len(values), -1), entropy.UPPER, axis=1))


def attention_distance(attention: Tensor, grid: tuple[int, int], prefix: int = 0, *, per_query: bool = False) -> Tensor:
    """Return the mean attention distance on the grid, for each image and head.

        1 / (n (n-1)) sum_{i != j} a_ij |p_i - p_j|_1,   n = h * w,   p in [0, 1]^2

    Args:
        attention: [B, H, N, N]; weights from and to prefix tokens do not count.
        grid: Rows and columns of the patches, (h, w).
        prefix: How many tokens, such as CLS, stand before the patches.
        per_query: Divide by n instead of n (n-1): how far a query looks on average, which does not shrink with n.

    Returns:
        [B, H] in float64.

    References:
        hyeonwoo2023 Fig. 7b.

    Example:
        >>> swap = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])  # two patches side by side that look at each other
        >>> attention_distance(swap, (1, 2))
        tensor([[1.]], dtype=torch.float64)
    """
    check_attention(attention)
    check_grid(attention.shape[3], grid, prefix)
    if attention.shape[2] != attention.shape[3] or grid == (1, 1):
        raise ValueError("attention must be [B, H, N, N] with at least two patches.")
    places = torch.cartesian_prod(*(torch.arange(side) for side in grid)).to(attention.device)
    apart = distance.grid_distances(places[None], grid).to(widen(attention).dtype)
    total = distance.total_distance(attention[:, None], nnf.pad(apart, (prefix, 0, prefix, 0)))
    patches = len(places)
    per_row = total / patches
    return per_row if per_query else per_row / (patches - 1)


def attention_map(attention: Tensor, grid: tuple[int, int], prefix: int = 1) -> Tensor:
    """Return the class token's attention to each patch, averaged over heads, on the grid.

    Args:
        attention: [B, H, N, N].
        grid: Rows and columns of the patches, (h, w).
        prefix: How many tokens stand before the patches, the class token first; with 0 the map is the mean over all
            queries.

    Returns:
        [B, h, w] in float64; resize it to the image with `torch.nn.functional.interpolate`.

    References:
        chen2022 Fig. 3, App. E.2.

    Example:
        >>> attention_map(torch.full((1, 3, 5, 5), 0.2), (2, 2))
        tensor([[[0.2000, 0.2000],
                 [0.2000, 0.2000]]], dtype=torch.float64)
    """
    check_attention(attention)
    check_grid(attention.shape[3], grid, prefix)
    weights = attention[:, None]
    everything = torch.ones(1, *attention.shape[2:], dtype=torch.bool, device=attention.device)
    found = maps.class_attention(weights) if prefix else maps.mean_attention(weights, everything)
    return found[:, 0, prefix:].reshape(len(found), *grid)


def softmax_jacobian_norm(
    attention: Tensor, scale: float = 1.0, norm: Literal["nuclear", "frobenius"] = "nuclear"
) -> Tensor:
    """Return a norm of the Jacobian J = scale (diag(a) - a a^T) of softmax(scale * s) at each attention row a.

        |J|_* = scale * sum_j (a_j - a_j^2)
        |J|_F = scale * sqrt(sum_j a_j^2 - 2 sum_j a_j^3 + (sum_j a_j^2)^2)

    The nuclear norm, the paper's, is largest, scale * (1 - 1/K), where attention is uniform: dense attention is the
    hardest to learn. The Frobenius norm is largest, scale / 2, where two keys share the attention.

    Args:
        attention: Rows that sum to 1, [..., K].
        scale: What the logits are multiplied by, 1 / sqrt(d) in a transformer.
        norm: `nuclear`, the sum of the singular values, or `frobenius`, the root of the sum of their squares.

    Returns:
        [...].

    References:
        hyeonwoo2023 Sec. 3.1, Fig. 5.

    Example:
        >>> softmax_jacobian_norm(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    if norm not in ("nuclear", "frobenius"):
        raise ValueError(f"norm must be 'nuclear' or 'frobenius' (got {norm!r}).")
    found = softmax_jacobian.nuclear_norm if norm == "nuclear" else softmax_jacobian.frobenius_norm
    return scale * found(widen(attention))


def cb_scale_ratio(scale: Tensor) -> float:
    """Return |lambda_0.1| / |lambda_0.9|, a ratio of quantiles of the learned CB_S scales of one layer.

    Args:
        scale: Lambda, [D].

    Returns:
        The ratio; NaN where the upper quantile is 0, as it is before training.

    References:
        hyeonwoo2023 Fig. 8.

    Example:
        >>> round(cb_scale_ratio(torch.arange(1.0, 12.0)), 3)
        0.2
    """
    check_shape(scale, "D", "scales")
    ratio = quantile_ratio(scale.detach().double().cpu().numpy())
    return math.nan if ratio is None else ratio


def uniform_attention(values: Tensor) -> Tensor:
    """Return the output of a uniform attention head: for each token, the mean value over all tokens.

    Args:
        values: [B, N, D].

    Returns:
        [B, N, D], every token the same.

    References:
        hyeonwoo2023 Sec. 3.3, Table 1.

    Example:
        >>> uniform_attention(torch.tensor([[[0.0], [4.0]]])).flatten().tolist()
        [2.0, 2.0]
    """
    check_shape(values, "B N D", "values")
    return uniform_heads.attend_uniformly(values)


def softmax_free_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return (q k^T / sqrt(D)) v: attention that uses its logits as weights.

    Args:
        query: [B, H, N, D].
        key: [B, H, N, D].
        value: [B, H, N, D].
        scale: Instead of 1 / sqrt(D).

    Returns:
        [B, H, N, D], at a cost linear in N.

    References:
        chen2022 Sec. 3 (ViT-Free).

    Example:
        >>> q = k = v = torch.ones(1, 1, 2, 4)
        >>> softmax_free_attention(q, k, v)[0, 0, 0, 0]  # two keys, each with the logit 4 / 2
        tensor(4.)
    """
    for x in (query, key, value):
        check_shape(x, "B H N D", "queries, keys and values")
    return attention_edit.attend_without_softmax(query, key, value, _scale(query, scale))


def talking_heads_attention(
    query: Tensor,
    key: Tensor,
    logits_mix: Tensor | None = None,
    weights_mix: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the weights W softmax(L q k^T / sqrt(D)) with mixes L and W of the heads; plain attention without them.

    Args:
        query: [B, H, Q, D].
        key: [B, H, K, D].
        logits_mix: L, [H, H], applied before the softmax.
        weights_mix: W, [H, H], applied behind it.
        scale: Instead of 1 / sqrt(D).
        mask: True where a key may be seen, as from `neighborhood_mask`; or numbers that are added to the logits.

    Returns:
        [B, H, Q, K].

    References:
        Shazeer et al. 2020; gong2021 Table 6.

    Example:
        >>> q = k = torch.zeros(1, 2, 3, 4)
        >>> talking_heads_attention(q, k, torch.eye(2), 3 * torch.eye(2))[0, 0, 0]
        tensor([1., 1., 1.])
    """
    for x in (query, key):
        check_shape(x, "B H N D", "queries and keys")
    for mix in (logits_mix, weights_mix):
        if mix is not None and mix.shape != (query.shape[1],) * 2:
            raise ValueError(f"a mix of {query.shape[1]} heads must be [H, H] (got {tuple(mix.shape)}).")
    return attention_edit.attention_weights(query, key, _scale(query, scale), mask, logits_mix, weights_mix)


def neighborhood_mask(grid: tuple[int, int], kernel: int, prefix: int = 0) -> Tensor:
    """Return the mask of keys each query sees in local attention: at most (kernel - 1) / 2 rows and columns away.

    A window of 2g - 1 on a g x g grid sees everything. Prefix tokens see and are seen by all.

    Args:
        grid: Rows and columns of the patches, (h, w).
        kernel: Side of the neighborhood, odd.
        prefix: How many tokens stand before the patches.

    Returns:
        Booleans [N, N], True where a query (first axis) sees a key.

    References:
        park2022 Sec. 2, Fig. 7 (convolutional ViT).

    Example:
        >>> neighborhood_mask((1, 3), kernel=3).int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be odd (got {kernel}).")
    return neighbourhood.neighbours(grid, kernel, prefix)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale
