"""Formulas of representation learning: DINO, contrastive and triplet losses.

Shapes: B images, V views, G of them the teacher's, K outputs or classes, N images or views, D features.
"""

from __future__ import annotations

from torch import Tensor

from vitclinic.functional.checks import check_labels, check_shape
from vitclinic.tasks import losses


def dino_targets(teacher: Tensor, centre: Tensor, temperature: float = 0.04) -> Tensor:
    """Return the teacher's targets softmax((t - c) / temperature): centred, then sharpened.

    Args:
        teacher: The teacher's outputs [G, B, K].
        centre: The centre [K], a moving average of the outputs' mean.
        temperature: The teacher's temperature.

    References:
        Caron et al., ICCV 2021.

    Example:
        >>> import torch
        >>> dino_targets(torch.tensor([[[1.0, 1.0]]]), torch.zeros(2))
        tensor([[[0.5000, 0.5000]]])
    """
    check_shape(teacher, "G B K", "teacher")
    return losses.centre_outputs(teacher, centre, temperature)


def dino_loss(targets: Tensor, student: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the cross-entropy of the student's views with the teacher's other views, over pairs and images.

        -1/(G V - G) sum_{g != v} p_g . log softmax(s_v / temperature)

    Args:
        targets: The teacher's probabilities [G, B, K] for the first G views.
        student: The student's outputs [V, B, K].
        temperature: The student's temperature.

    References:
        Caron et al., ICCV 2021, Eq. 3.

    Example:
        >>> import torch
        >>> targets = torch.full((2, 1, 2), 0.5)
        >>> dino_loss(targets, torch.zeros(3, 1, 2))
        tensor(0.6931)
    """
    check_shape(targets, "G B K", "targets")
    check_shape(student, "V B K", "student")
    return losses.dino_loss(targets, student, temperature)


def sinkhorn(outputs: Tensor, temperature: float = 0.04, iterations: int = 3) -> Tensor:
    """Return probabilities that use all outputs equally, by Sinkhorn-Knopp on exp(outputs / temperature).

    Columns are scaled to sum to 1/K and rows to 1/N in turn; at the end every row sums to 1.

    Args:
        outputs: [N, K].
        temperature: Small ones make the probabilities sharp.
        iterations: Number of turns.

    References:
        Caron et al., NeurIPS 2020, Sec. 3.1.

    Example:
        >>> import torch
        >>> sinkhorn(torch.tensor([[5.0, 0.0], [5.0, 0.0]]), temperature=1.0)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    check_shape(outputs, "N K", "outputs")
    return losses.sinkhorn(outputs, temperature, iterations)


def supervised_contrastive_loss(features: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the supervised contrastive loss, averaged over the images that share their class with another.

        -1/|P(i)| sum_{p in P(i)} log[ exp(z_i . z_p / t) / sum_{a != i} exp(z_i . z_a / t) ]

    Args:
        features: [N, D], scaled to length 1 here.
        labels: Classes [N]; P(i) are the others of the class of i.
        temperature: The temperature t.

    References:
        Khosla et al., NeurIPS 2020, Eq. 2; chen2022 App. C.

    Example:
        >>> import torch
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> round(supervised_contrastive_loss(features, torch.tensor([0, 0, 1, 1]), 1.0).item(), 4)  # log(1 + 2 / e)
        0.5514
    """
    check_shape(features, "N D", "features")
    check_labels(labels, len(features), "labels")
    return losses.supervised_contrastive_loss(features, labels, temperature)


def triplet_loss(features: Tensor, labels: Tensor, margin: float = 0.3) -> Tensor:
    """Return the batch-hard triplet loss, averaged over the images with a positive and a negative.

        max(0, max_{p in P(i)} |f_i - f_p| - min_{n not in P(i)} |f_i - f_n| + margin)

    Args:
        features: [N, D].
        labels: Classes [N]; P(i) are the others of the class of i.
        margin: The margin.

    References:
        Hermans et al., 2017, Eq. 5; wang2022 Table 4.

    Example:
        >>> import torch
        >>> features = torch.tensor([[0.0], [1.0], [3.0], [3.0]])
        >>> triplet_loss(features, torch.tensor([0, 0, 1, 1]), margin=2.0)  # 0, 1, 0 and 0
        tensor(0.2500)
    """
    check_shape(features, "N D", "features")
    check_labels(labels, len(features), "labels")
    return losses.triplet_loss(features, labels, margin)
