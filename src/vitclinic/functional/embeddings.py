"""Formulas of embeddings, one vector for each image: nearest neighbours, retrieval, alignment and uniformity.

Shapes: n images, m queries, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitclinic._core import neighbours
from vitclinic.functional.checks import check_labels, check_same, check_shape, widen
from vitclinic.probes.features import embeddings


def knn_predict(
    train: Tensor, labels: Tensor, queries: Tensor, k: int = 20, temperature: float | None = None
) -> Tensor:
    """Return the class of each query by a vote of its k nearest training embeddings, in cosine similarity.

    Args:
        train: Embeddings of training images, [n, D].
        labels: Their classes, [n].
        queries: Embeddings to classify, [m, D].
        k: Number of neighbours.
        temperature: A vote weighs exp(similarity / temperature); 1 unless given.

    Returns:
        Class indices [m]; among classes with the same votes, the first.

    References:
        Wu et al., CVPR 2018; Caron et al., ICCV 2021.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_predict(train, torch.tensor([1, 1, 0]), torch.tensor([[0.8, 0.2]]), k=1)
        tensor([1])
    """
    check_shape(train, "n D", "training embeddings")
    check_shape(queries, "m D", "queries")
    check_labels(labels, len(train), "labels")
    return embeddings.knn_predict(widen(train), labels, widen(queries), k, temperature)


def mean_average_precision(x: Tensor, labels: Tensor) -> Tensor:
    """Return the mean average precision of retrieving images of the same class, leave-one-out by cosine similarity.

        AP = 1/R sum over the R relevant images of (relevant images up to its rank) / rank

    Args:
        x: Embeddings, [n, D].
        labels: Their classes, [n]; an image whose class no other has is no query.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> mean_average_precision(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
        tensor(1.)
    """
    return _rank(x, labels).average_precision.mean().to(widen(x).dtype)


def cumulative_matching(x: Tensor, labels: Tensor, ranks: int = 20) -> Tensor:
    """Return the share of images with one of the same class among their 1, 2, ... `ranks` nearest (CMC).

    Args:
        x: Embeddings, [n, D].
        labels: Their classes, [n]; an image whose class no other has is no query.
        ranks: Length of the curve.

    Returns:
        The curve, [ranks]; its first value is Rank-1.

    Example:
        >>> cumulative_matching(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), torch.tensor([0, 1, 0]), 2)
        tensor([0., 1.])
    """
    return embeddings.matching_curve(_rank(x, labels).first_rank, ranks)


def alignment(x: Tensor, labels: Tensor, alpha: float = 2.0) -> Tensor:
    """Return the mean of |x - y|^alpha over pairs of images of one class, for embeddings scaled to length 1.

    Args:
        x: Embeddings, [n, D].
        labels: Their classes, [n].
        alpha: The exponent.

    Returns:
        A scalar, computed in float64; NaN if no two images are of one class.

    References:
        Wang and Isola, ICML 2020.

    Example:
        >>> alignment(torch.eye(2), torch.tensor([3, 3]))
        tensor(2.)
    """
    check_shape(x, "n D", "embeddings")
    check_labels(labels, len(x), "labels")
    return torch.tensor(embeddings.alignment(x.detach(), labels, alpha), dtype=widen(x).dtype)


def uniformity(x: Tensor, t: float = 2.0) -> Tensor:
    """Return log mean exp(-t |x - y|^2) over all pairs of images, for embeddings scaled to length 1.

    Args:
        x: Embeddings of two or more images, [n, D].
        t: Sharpness of the kernel.

    Returns:
        A scalar, computed in float64: 0 if all embeddings are the same, lower the more evenly they are spread.

    References:
        Wang and Isola, ICML 2020.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        tensor(-8.)
    """
    check_shape(x, "n D", "embeddings")
    return torch.tensor(embeddings.uniformity(x.detach(), t), dtype=widen(x).dtype)


def average_precision(scores: Tensor, relevant: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the average precision of each query, [N], whose mean is mAP; NaN for a query without a match.

        AP = 1/R sum_{i relevant} (matches among the first rank_i) / rank_i

    Args:
        scores: Similarity of each query to each image of the gallery [N, M].
        relevant: True for matches [N, M].
        valid: False for images that a query leaves out, such as itself [N, M]; all count unless given.

    Example:
        >>> average_precision(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[True, False, True]]))
        tensor([0.8333], dtype=torch.float64)
    """
    check_shape(scores, "N M", "scores")
    check_same(scores, relevant, "scores and relevant")
    return neighbours.average_precision(scores, relevant, valid)


def match_rank(scores: Tensor, relevant: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the rank of each query's first match, from 1, [N]; NaN for a query without a match.

    The share of queries whose rank is at most k is Rank-k; all of them are the CMC curve.

    Args:
        scores: Similarity of each query to each image of the gallery [N, M].
        relevant: True for matches [N, M].
        valid: False for images that a query leaves out, such as itself [N, M]; all count unless given.

    Example:
        >>> match_rank(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[False, True, True]]))
        tensor([2.], dtype=torch.float64)
    """
    check_shape(scores, "N M", "scores")
    check_same(scores, relevant, "scores and relevant")
    return neighbours.match_rank(scores, relevant, valid)


def rerank(distances: Tensor, k: int = 20, expansion: int = 6, weight: float = 0.3) -> Tensor:
    """Return distances that also count the k-reciprocal neighbours which two images share, [N, N].

        d* = (1 - weight) d_J + weight d

    with d the distances, each row divided by its largest, and d_J the Jaccard distance of the images' k-reciprocal
    neighbours, weighted by exp(-d) and averaged over the `expansion` nearest images.

    Args:
        distances: Distances of all images from each other [N, N], such as 2 - 2 cos; the diagonal is 0.
        k: Number of neighbours, k1 of the paper.
        expansion: Images whose neighbours are averaged, k2 of the paper.
        weight: Weight of the old distances, lambda of the paper.

    References:
        Zhong et al., CVPR 2017.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [1.9], [6.0], [7.0]])
        >>> rerank((x - x.T).square(), k=1, expansion=1)[1].argsort().tolist()
        [1, 2, 0, 3, 4]
    """
    check_shape(distances, "N N", "distances")
    return neighbours.rerank(widen(distances), k, expansion, weight)


def effective_rank(features: Tensor) -> float:
    """Return exp of the entropy of the singular values of centred features: 1 on a line, at most D, 0 if constant.

        exp(-sum_i p_i log p_i),   p_i = s_i / sum_j s_j

    Args:
        features: [N, D].

    References:
        Roy and Vetterli, EUSIPCO 2007.

    Example:
        >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 4)
        2.0
    """
    check_shape(features, "N D", "features")
    return neighbours.effective_rank(features)


def _rank(x: Tensor, labels: Tensor) -> neighbours.Ranking:
    check_shape(x, "n D", "embeddings")
    check_labels(labels, len(x), "labels")
    return neighbours.rank_leave_one_out(widen(x.detach()), labels)
