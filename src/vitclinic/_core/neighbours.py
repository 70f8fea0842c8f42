"""Nearest neighbours of features: votes of the k nearest, retrieval and its re-ranking; and the rank of features.

Shapes: M images in the bank, N queries, D features, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024


def knn_votes(
    bank_md: Tensor,
    labels_m: Tensor,
    queries_nd: Tensor,
    num_classes: int,
    k: int = 20,
    temperature: float | None = 0.07,
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
        temperature: Temperature of the votes; None makes all neighbours equal.

    Example:
        >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
        >>> knn_votes(bank, torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.1]]), 2, k=1)
        tensor([[1., 0.]])
    """
    bank = F.normalize(bank_md, dim=1)
    parts = []
    for queries in torch.split(F.normalize(queries_nd, dim=1), CHUNK):
        similarity, index = (queries @ bank.T).topk(min(k, len(bank)), dim=1)
        weights = torch.ones_like(similarity)
        if temperature is not None:
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


def average_precision(scores_nm: Tensor, relevant_nm: Tensor, valid_nm: Tensor | None = None) -> Tensor:
    """Return each query's average precision, [N]: the mean, over its matches, of the precision at their ranks.

        AP = 1/R sum_{i relevant} (matches among the first rank_i) / rank_i

    Its mean over queries is mAP. A query without a match is NaN.

    Args:
        scores_nm: Similarity of each query to each image of the gallery.
        relevant_nm: True for matches.
        valid_nm: False for images that a query leaves out, such as itself or those of its own camera.

    Example:
        >>> scores, relevant = torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[True, False, True]])
        >>> average_precision(scores, relevant)  # (1/1 + 2/3) / 2
        tensor([0.8333], dtype=torch.float64)
    """
    hits = _ranked_matches(scores_nm, relevant_nm, valid_nm)
    rank = hits.valid.cumsum(1).clamp(min=1)
    precision = hits.relevant.cumsum(1).double() / rank
    return (precision * hits.relevant).sum(1) / hits.relevant.sum(1)


def match_rank(scores_nm: Tensor, relevant_nm: Tensor, valid_nm: Tensor | None = None) -> Tensor:
    """Return the rank of each query's first match, from 1, [N]; NaN for a query without a match.

    The share of queries whose rank is at most k is Rank-k, a point of the CMC curve.

    Example:
        >>> scores, relevant = torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[False, False, True]])
        >>> match_rank(scores, relevant), match_rank(scores, relevant, torch.tensor([[False, True, True]]))
        (tensor([3.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    hits = _ranked_matches(scores_nm, relevant_nm, valid_nm)
    first = hits.relevant.int().argmax(1, keepdim=True)
    rank = hits.valid.cumsum(1).gather(1, first)[:, 0].double()
    return rank.masked_fill(~hits.relevant.any(1), torch.nan)


class Ranking(NamedTuple):
    """The gallery as each query ranks it, for queries that have a match."""

    average_precision: Tensor
    """[queries]"""
    first_rank: Tensor
    """Rank of the first match, from 1, [queries]."""


def rank_leave_one_out(
    features_nd: Tensor,
    labels_n: Tensor,
    groups_n: Tensor | None = None,
    reranked: bool = False,
    queries_n: Tensor | None = None,
) -> Ranking:
    """Rank all other images for each image, or the gallery for each query, by cosine similarity.

    Matches are those with the same label.

    Args:
        features_nd: Features of all images.
        labels_n: Their labels.
        groups_n: Images of the same label and group, such as a camera, are left out besides the image itself.
        reranked: Rank by `rerank`, which compares the neighbours of images, too; it holds N x N numbers.
        queries_n: True for queries, False for the gallery; every image is a query and in the gallery unless given.

    Example:
        >>> ranking = rank_leave_one_out(torch.eye(3)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
        >>> ranking.average_precision.tolist(), ranking.first_rank.tolist()
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 1, 1])
    """
    unit = F.normalize(features_nd, dim=1)
    groups = torch.arange(len(labels_n), device=labels_n.device) if groups_n is None else groups_n
    changed = -rerank((2 - 2 * unit @ unit.T).clamp(min=0)) if reranked else None
    precisions, ranks = [], []
    every = torch.ones_like(labels_n, dtype=torch.bool)
    asked, gallery = (every, every) if queries_n is None else (queries_n, ~queries_n)
    for rows in torch.split(asked.nonzero()[:, 0], CHUNK):
        same = labels_n[rows, None] == labels_n[None]
        valid = gallery[None] & ~(same & (groups[rows, None] == groups[None]))
        scores = unit[rows] @ unit.T if changed is None else changed[rows]
        precisions.append(average_precision(scores, same, valid))
        ranks.append(match_rank(scores, same, valid))
    rank = torch.cat(ranks)
    matched = ~rank.isnan()
    return Ranking(torch.cat(precisions)[matched], rank[matched].long())


class _Ranked(NamedTuple):
    """Gallery of each query, the most similar first."""

    relevant: Tensor
    valid: Tensor


def _ranked_matches(scores_nm: Tensor, relevant_nm: Tensor, valid_nm: Tensor | None) -> _Ranked:
    valid = torch.ones_like(relevant_nm) if valid_nm is None else valid_nm
    order = scores_nm.sort(dim=1, descending=True, stable=True).indices
    return _Ranked((relevant_nm & valid).gather(1, order), valid.gather(1, order))


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
