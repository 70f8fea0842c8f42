"""Scores of semantic segmentation: intersection over union of the classes, with an interval over images.

Shapes: B images, K classes, H x W pixels. The counts of an image are [3, K]: pixels of a class in both, in the
prediction, and in the truth; void pixels of the truth count nowhere.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

VOID = 255
_DRAWS = 1000


def count_pixels(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the counts of each image, int64 [B, 3, K].

    Args:
        predicted: Classes [B, H, W].
        truth: Classes [B, H, W], with 255 for void.
        classes: The number of classes K.

    Example:
        >>> truth = torch.tensor([[[0, 1], [1, 255]]])
        >>> count_pixels(torch.tensor([[[0, 1], [0, 0]]]), truth, 2).tolist()
        [[[1, 1], [2, 1], [1, 2]]]
    """
    images = torch.arange(len(truth), device=truth.device)[:, None, None].expand_as(truth)
    known = truth != VOID
    offsets, predicted, truth = images[known] * classes, predicted[known].long(), truth[known].long()
    places = [(offsets + truth)[predicted == truth], offsets + predicted, offsets + truth]
    counts = [torch.bincount(place, minlength=len(images) * classes).reshape(-1, classes) for place in places]
    return torch.stack(counts, dim=1)


def count_batch(scores: Tensor, masks: Tensor, classes: int) -> tuple[NDArray[np.int64], float, int]:
    """Return the counts of each image [B, 3, K], the sum of the cross-entropy, and how many pixels it is over."""
    counts = count_pixels(scores.argmax(1), masks, classes).cpu().numpy()
    nll = F.cross_entropy(scores.double(), masks.long(), ignore_index=VOID, reduction="sum")
    return counts, float(nll), int((masks != VOID).sum())


def class_iou(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return intersection over union of each class from counts [..., 3, K]; NaN for a class that is nowhere."""
    both, predicted, true = np.moveaxis(counts.astype(np.float64), -2, 0)
    union = predicted + true - both
    iou: NDArray[np.float64] = np.divide(both, union, out=np.full_like(both, np.nan), where=union > 0)
    return iou


def mean_iou(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean over the classes that are somewhere, from counts [..., 3, K] of all images together."""
    iou = class_iou(counts)
    there = ~np.isnan(iou)
    total = np.asarray(np.where(there, iou, 0.0).sum(-1))
    mean: NDArray[np.float64] = np.divide(total, there.sum(-1), out=np.full_like(total, np.nan), where=there.any(-1))
    return mean


def resample_counts(counts: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """Return the counts [r, 3, K] of r samples of the images [n, 3, K], drawn with replacement: the bootstrap."""
    draws = np.random.default_rng(seed).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=_DRAWS)
    drawn: NDArray[np.int64] = np.einsum("rn,nck->rck", draws, counts)
    return drawn


def mean_iou_interval(counts: NDArray[np.int64], seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of the mean IoU over images [n, 3, K], by the bootstrap."""
    low, high = np.nanquantile(mean_iou(resample_counts(counts, seed)), (0.025, 0.975))
    return float(low), float(high)
