"""Losses of representations: DINO's, with its centre and Sinkhorn's alternative, supervised contrastive, triplets.

All compute in at least float32, even under autocast; float64 stays float64.
Shapes: B images, V views, G of them global, K outputs, D features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitclinic._core.precision import upcast


def dino_loss(teacher_gbk: Tensor, student_vbk: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the cross-entropy of the student's views with the teacher's other views, averaged over pairs and images.

        -1/(G V - G) sum_{g != v} p_g . log softmax(s_v / temperature)

    The first G views of the student are those of the teacher [Caron et al., ICCV 2021, Eq. 3].

    Args:
        teacher_gbk: The teacher's probabilities [G, B, K], sharpened and centred.
        student_vbk: The student's outputs [V, B, K].
        temperature: The student's temperature.
    """
    with torch.autocast(student_vbk.device.type, enabled=False):
        log_vbk = F.log_softmax(upcast(student_vbk) / temperature, dim=-1)
        terms_gv = -torch.einsum("gbk,vbk->gv", teacher_gbk.to(log_vbk.dtype), log_vbk) / student_vbk.shape[1]
        others = terms_gv.numel() - len(terms_gv)
        return (terms_gv.sum() - terms_gv.diagonal().sum()) / others


def centre_outputs(teacher_gbk: Tensor, centre_k: Tensor, temperature: float) -> Tensor:
    """Return softmax((t - c) / temperature): the teacher's outputs, centred and sharpened."""
    return F.softmax((upcast(teacher_gbk) - centre_k) / temperature, dim=-1)


def sinkhorn(
    outputs_nk: Tensor,
    temperature: float,
    iterations: int = 3,
    total: Callable[[Tensor], Tensor] = lambda part: part,
) -> Tensor:
    """Return probabilities that use all outputs equally: Sinkhorn-Knopp on exp(outputs / temperature).

    Columns are scaled to sum to 1/K, then rows to 1/N, in turn; at the end every row sums to 1
    [Caron et al., NeurIPS 2020, Sec. 3.1].

    Args:
        outputs_nk: The teacher's outputs for all views of all images, or this process's part of them.
        temperature: The teacher's temperature.
        iterations: Number of turns.
        total: Adds up a tensor of all processes.
    """
    scores = upcast(outputs_nk) / temperature
    count = total(torch.tensor(float(len(scores)), dtype=scores.dtype, device=scores.device))
    # A factor for each row is undone by the rows' scaling, so the largest value can be taken out of each.
    share = (scores - scores.amax(1, keepdim=True)).exp()
    share = share / share.sum(1, keepdim=True)
    for _ in range(iterations):
        share = share / (total(share.sum(0)) * share.shape[1] / count)
        share = share / share.sum(1, keepdim=True)
    return share


def supervised_contrastive_loss(features_nd: Tensor, labels_n: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the supervised contrastive loss, averaged over all images that have a positive.

        -1/|P(i)| sum_{p in P(i)} log[ exp(z_i . z_p / t) / sum_{a != i} exp(z_i . z_a / t) ]

    where P(i) are the other images of the same class, and z features of length 1 [Khosla et al., NeurIPS 2020, Eq. 2].

    Args:
        features_nd: Features of all views of all images; they are scaled to length 1.
        labels_n: Their classes.
        temperature: The temperature t.
    """
    with torch.autocast(features_nd.device.type, enabled=False):
        unit = F.normalize(upcast(features_nd), dim=1)
        scores = unit @ unit.T / temperature
        itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
        log_nn = F.log_softmax(scores.masked_fill(itself, -torch.inf), dim=1)
        positive = (labels_n[:, None] == labels_n[None]) & ~itself
        count = positive.sum(1)
        mean = -log_nn.masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
        return mean.sum() / (count > 0).sum().clamp(min=1)


def triplet_loss(features_nd: Tensor, labels_n: Tensor, margin: float | None = 0.3) -> Tensor:
    """Return the batch-hard triplet loss, averaged over the images that have a positive and a negative.

        max(0, max_{p in P(i)} |f_i - f_p| - min_{n not in P(i)} |f_i - f_n| + margin)

    [Hermans et al., 2017, Eq. 5; wang2022 Table 4]. Without a margin, the soft one: log(1 + exp(x)) of the difference.

    Args:
        features_nd: Features.
        labels_n: Their classes, or identities.
        margin: The margin; None for the soft margin.

    Example:
        >>> features, labels = torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 0, 1, 1])
        >>> loss = triplet_loss(features, labels, margin=1.2)  # of the second image alone: 1 - 2 + 1.2, shared by four
        >>> round(loss.item(), 4)
        0.05
    """
    with torch.autocast(features_nd.device.type, enabled=False):
        features = upcast(features_nd)
        itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
        same = labels_n[:, None] == labels_n[None]
        squares = (features[:, None] - features[None]).square().sum(-1)
        distance = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)  # the root has no slope at 0
        hardest = distance.masked_fill(~same | itself, -torch.inf).amax(1)
        nearest = distance.masked_fill(same, torch.inf).amin(1)
        has_both = (same & ~itself).any(1) & (~same).any(1)
        excess = torch.where(has_both, hardest - nearest, 0)
        loss = F.softplus(excess) if margin is None else (excess + margin).clamp(min=0)
        return (loss * has_both).sum() / has_both.sum().clamp(min=1)
