"""Nearest neighbours of features: votes of the k nearest, and the effective rank of a set of features.

Shapes: M images in the bank, N queries, D features, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1024


def knn_predict(
    bank_md: Tensor, labels_m: Tensor, queries_nd: Tensor, num_classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Return the share of the votes of each query's k nearest neighbours that each class has, [N, K].

        votes(c) = sum_{i among the k nearest, y_i = c} exp(cos(q, x_i) / temperature)

    as in DINO's evaluation [Caron et al., ICCV 2021; Wu et al., CVPR 2018]; divided by their sum.

    Args:
        bank_md: Features of labelled images.
        labels_m: Their classes.
        queries_nd: Features to classify.
        num_classes: Number of classes K.
        k: Number of neighbours; all of the bank if it is smaller.
        temperature: Temperature of the votes; large ones make all neighbours equal.

    Example:
        >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
        >>> knn_predict(bank, torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.1]]), 2, k=1)
        tensor([[1., 0.]])
    """
    bank = F.normalize(bank_md, dim=1)
    parts = []
    for queries in torch.split(F.normalize(queries_nd, dim=1), _CHUNK):
        similarity, index = (queries @ bank.T).topk(min(k, len(bank)), dim=1)
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = torch.zeros(len(queries), num_classes, dtype=bank.dtype, device=bank.device)
        votes.scatter_add_(1, labels_m[index], weights)
        parts.append(votes / weights.sum(1, keepdim=True))
    return torch.cat(parts)


def effective_rank(features_nd: Tensor) -> float:
    """Return exp of the entropy of the singular values of the centred features: 1 if all vary along a line, at most D.

        exp(-sum_i p_i log p_i),   p_i = s_i / sum_j s_j      [Roy and Vetterli, EUSIPCO 2007]

    Features that do not vary at all have rank 0.

    Example:
        >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 4)
        2.0
    """
    centred = (features_nd - features_nd.mean(0)).double()
    if not bool(centred.isfinite().all()):
        return float("nan")
    values = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0).sqrt()
    total = values.sum()
    if float(total) <= 1e-12 * float(features_nd.double().norm()):
        return 0.0
    share = values[values > 0] / total
    return float((-(share * share.log()).sum()).exp())
