"""Re-ranking of retrieval by k-reciprocal neighbours [Zhong et al., CVPR 2017].

Two images are k-reciprocal neighbours if each is among the k nearest of the other: a match is more often so than an
image that is near by chance. Shapes: N images, all of them queries and gallery.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rerank(distance_nn: Tensor, k: int = 20, expansion: int = 6, weight: float = 0.3) -> Tensor:
    """Return distances that also count the k-reciprocal neighbours which two images share, [N, N].

        R(i, k) = {j : j among the k + 1 nearest of i, i among those of j}, i itself included
        R*(i)   = R(i, k), joined by every R(j, k / 2) of a member j that has two thirds of its own members in R(i, k)
        V_i     = exp(-d_ij) for j in R*(i), else 0, scaled to sum 1; then the mean over the `expansion` nearest of i
        d*_ij   = (1 - weight) (1 - sum min(V_i, V_j) / sum max(V_i, V_j)) + weight d_ij

    with d the distances, each row divided by its largest.

    Args:
        distance_nn: Distances of all images from each other, such as 2 - 2 cos; the diagonal is 0.
        k: Number of neighbours, k1 of the paper.
        expansion: Images whose V are averaged, k2 of the paper; the image itself is the first.
        weight: Weight of the old distances, lambda of the paper; 1 changes no ranking.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [1.9], [6.0], [7.0]])
        >>> rerank((x - x.T).square(), k=1, expansion=1)[1].argsort().tolist()
        [1, 2, 0, 3, 4]
    """
    distance = distance_nn / distance_nn.amax(1, keepdim=True).clamp(min=1e-12)
    order = distance_nn.argsort(dim=1, stable=True)
    near, half = _reciprocal(order, k), _reciprocal(order, max(1, round(k / 2)))
    shared = near.to(distance.dtype) @ half.to(distance.dtype).T  # members of R(j, k / 2) in R(i, k), [i, j]
    joins = near & (shared >= 2 / 3 * half.sum(1) - 1e-6)
    expanded = near | ((joins.to(distance.dtype) @ half.to(distance.dtype)) > 0)
    values = torch.where(expanded, (-distance).exp(), 0)
    values = values / values.sum(1, keepdim=True)
    values = values[order[:, :expansion]].mean(1)
    return (1 - weight) * _jaccard_distance(values) + weight * distance


def _reciprocal(order_nn: Tensor, k: int) -> Tensor:
    """Return R(i, k) as a mask [N, N]: j is among the k + 1 first of i, and i among those of j."""
    first = torch.zeros_like(order_nn, dtype=torch.bool).scatter_(1, order_nn[:, : k + 1], True)
    return first & first.T


def _jaccard_distance(values_nn: Tensor) -> Tensor:
    """Return 1 - sum min / sum max of each two rows, which sum to 1: sum max = 2 - sum min."""
    rows = []
    for row in values_nn:
        columns = row.nonzero()[:, 0]
        smaller = torch.minimum(row[columns], values_nn[:, columns]).sum(1)
        rows.append(1 - smaller / (2 - smaller))
    return torch.stack(rows)
