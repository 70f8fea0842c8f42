"""Formulas of what a network answers: losses, accuracy, calibration, lesions, missing rate, shape bias.

Shapes: B images, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitclinic.anatomy import Layout, out_of
from vitclinic.anatomy.removal import Bypass, Silence
from vitclinic.functional.checks import check_labels, check_same, check_shape
from vitclinic.probes.behaviour import accuracy as answers
from vitclinic.probes.behaviour import intervals, shift
from vitclinic.probes.behaviour import missing_rate as midpoints
from vitclinic.probes.behaviour import shape_bias as conflicts
from vitclinic.tasks import classification

Model = Callable[[Tensor], Any]


def accuracy(logits: Tensor, targets: Tensor, k: int = 1) -> float:
    """Return the top-k accuracy: the share of images whose label is among the k largest logits (first class wins ties).

    Args:
        logits: [B, K].
        targets: Class indices [B].
        k: 1 for top-1, 5 for top-5.

    Example:
        >>> accuracy(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), torch.tensor([2, 0]), k=1)
        0.5
    """
    check_shape(logits, "B K", "logits")
    check_labels(targets, len(logits), "targets")
    return float((answers.ranks(logits.detach().cpu(), targets.cpu()) < k).double().mean())


def accuracy_on_valid(logits: Tensor, valid: Tensor) -> float:
    """Return the accuracy with several valid labels per image, as in ReaL: any of them counts as correct.

    Args:
        logits: [B, K].
        valid: Booleans [B, K]; images without a right class are left out.

    References:
        Beyer et al. 2020; chen2022 Table 2.

    Example:
        >>> valid = torch.tensor([[True, True, False], [False, False, True]])
        >>> accuracy_on_valid(torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]), valid)
        0.5
    """
    check_shape(logits, "B K", "logits")
    check_same(logits, valid, "logits and valid classes")
    counted = valid.any(1).cpu().numpy()
    if not counted.any():
        raise ValueError("No image has a valid label.")
    return float(shift.hits(logits.detach(), valid.cpu().numpy())[counted].mean())


class Reliability(NamedTuple):
    """A reliability diagram: accuracy and mean confidence per bin of confidence; NaN for empty bins."""

    images: Tensor
    """Number of images in each bin."""
    confidence: Tensor
    accuracy: Tensor


def reliability_diagram(logits: Tensor, targets: Tensor, bins: int = 15) -> Reliability:
    """Return mean confidence and accuracy in bins of equal width of the confidence max_k p(k).

    Args:
        logits: [B, K].
        targets: Class indices [B].
        bins: How many; open below, closed above.

    Returns:
        Images, confidence and accuracy of each bin, [bins] each.

    References:
        Guo et al., ICML 2017; park2022 Fig. F.1.

    Example:
        >>> reliability_diagram(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), bins=2).accuracy
        tensor([0.7500,    nan], dtype=torch.float64)
    """
    arrays = _reliability(logits, targets, bins).diagram()
    return Reliability(*(torch.from_numpy(arrays[f"bin_{key}"]) for key in ("images", "confidence", "accuracy")))


def expected_calibration_error(logits: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error.

        ECE = sum_b n_b/n |accuracy_b - confidence_b|

    Args:
        logits: [B, K].
        targets: Class indices [B].
        bins: Bins of equal width of the confidence.

    References:
        Guo et al., ICML 2017; park2022 Fig. F.1.

    Example:
        >>> expected_calibration_error(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))  # 50% sure, 75% right
        0.25
    """
    return _reliability(logits, targets, bins).gap


_COLDEST, _HOTTEST = 1e-3, 1e3


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the temperature T at which softmax(logits / T) fits the labels best: temperature scaling.

        T = argmin_T 1/n sum_i -sum_k t_i(k) log softmax(z_i / T)_k,   t_i(y_i) = (n + 1) / (n + 2)

    The rest of t_i, 1 / (n + 2), is shared by the other classes: one pseudo-count in all, as in Platt 1999, however
    many classes there are. A few images that are all right would otherwise make the network certain of
    everything. The loss
    is convex in 1/T, and its root is found by bisection.

    Args:
        logits: [B, K], of images that were not trained on.
        targets: Class indices [B].

    Returns:
        The temperature, from 0.001 to 1000: above 1 for a network that is too sure of itself.

    References:
        Guo et al., ICML 2017; Platt 1999.

    Example:
        >>> sure = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
        >>> round(fit_temperature(sure, torch.tensor([0, 0, 1, 1])), 2)
        5.77
    """
    check_shape(logits, "B K", "logits")
    check_labels(targets, len(logits), "targets")
    if not len(logits):
        raise ValueError("Need at least one image to fit a temperature to.")
    z_bk, y_b = logits.detach().cpu().double(), targets.cpu()
    n, k = z_bk.shape
    t_bk = torch.full_like(z_bk, 1 / (n + 2) / max(1, k - 1)).scatter_(1, y_b[:, None], (n + 1) / (n + 2))
    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    for _ in range(60):
        middle = (low + high) / 2
        slope = (((z_bk / math.exp(middle)).softmax(1) - t_bk) * z_bk).sum()  # of the loss, in 1/T
        low, high = (low, middle) if slope < 0 else (middle, high)
    return math.exp((low + high) / 2)


def _reliability(logits: Tensor, targets: Tensor, bins: int) -> answers.Reliability:
    check_shape(logits, "B K", "logits")
    check_labels(targets, len(logits), "targets")
    if bins < 1 or not len(logits):
        raise ValueError(f"Need at least one bin and one image (got {bins} and {len(logits)}).")
    logits, targets = logits.detach().cpu().double(), targets.cpu()
    found = answers.Reliability(bins)
    confidence = logits.log_softmax(1).amax(1).exp().numpy()
    found.add(confidence, (answers.ranks(logits, targets) == 0).numpy())
    return found


def accuracy_drop(correct: Tensor, changed: Tensor) -> float:
    """Return the drop in accuracy on the same images, after a lesion, noise or a corruption.

    Args:
        correct: Whether each image is recognised by the network as it is, booleans [B].
        changed: The same after the change, [B].

    References:
        park2022 Fig. 2b, 10b.

    Example:
        >>> accuracy_drop(torch.tensor([True, True, True, False]), torch.tensor([True, False, False, False]))
        0.5
    """
    check_same(correct, changed, "the answers before and after")
    before, after = (answer.cpu().numpy().astype(np.bool_) for answer in (correct, changed))
    return intervals.drop(before, after).value


@contextmanager
def lesion(module: nn.Module) -> Iterator[None]:
    """Remove a module from its network inside the context.

    A branch (an MSA, an MLP) gives zero, so that the residual passes unchanged; a Conv2d between as many channels gives
    its input, every s-th place of it if it has a stride s.

    Args:
        module: A module whose output is one tensor.

    References:
        park2022 Fig. 10b, App. D.4.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with lesion(layer):
        ...     layer(torch.ones(1, 2)).tolist()
        [[0.0, 0.0]]
    """
    if isinstance(module, nn.Conv2d) and module.in_channels == module.out_channels:
        with Bypass(module).apply():
            yield
        return
    with Silence(out_of(module, Layout())).apply():
        yield


def midpoint(one: Tensor, other: Tensor) -> Tensor:
    """Return the images halfway between two batches, (x_i + x_j) / 2, for the missing rate.

    Args:
        one: [B, C, H, W].
        other: As many images of the same size.

    Example:
        >>> midpoint(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)).item()
        0.5
    """
    check_same(one, other, "the two batches")
    return midpoints.midpoint(one, other)


def missing_rate(predictions: Tensor, one: Tensor, other: Tensor) -> float:
    """Return the share of predictions at midpoints of two images that are neither's class.

    Args:
        predictions: Classes predicted at `midpoint(x_i, x_j)`, [B].
        one: y_i, [B].
        other: y_j, [B].

    References:
        chen2022 Table 6; Zhang et al., ICLR 2018.

    Example:
        >>> missing_rate(torch.tensor([0, 5]), torch.tensor([0, 1]), torch.tensor([3, 2]))
        0.5
    """
    check_same(predictions, one, "predictions and labels")
    check_same(predictions, other, "predictions and labels")
    return float(midpoints.is_missed(predictions, one, other).double().mean())


def shape_bias(predictions: Tensor, shapes: Tensor, textures: Tensor) -> float:
    """Return the share of shape decisions among shape or texture decisions, on images where the two disagree.

    Args:
        predictions: [B].
        shapes: The class of each image's shape, [B].
        textures: The class of its texture, [B].

    Returns:
        NaN where no decision is for either.

    References:
        Geirhos et al., ICLR 2019.

    Example:
        >>> shape_bias(torch.tensor([0, 1, 2, 7]), torch.tensor([0, 1, 5, 3]), torch.tensor([4, 4, 2, 2]))
        0.6666666666666666
    """
    check_same(predictions, shapes, "predictions and shapes")
    check_same(predictions, textures, "predictions and textures")
    chosen, shape, texture = (labels.cpu().numpy().astype(np.int64) for labels in (predictions, shapes, textures))
    by_shape, by_texture = (int(count.sum()) for count in conflicts.count_decisions(chosen, shape, texture, 0))
    return by_shape / (by_shape + by_texture) if by_shape + by_texture else float("nan")


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (NLL), averaged over images; half precision is computed in float32.

        -1/B sum_i sum_k y_i(k) log p_i(k)

    Args:
        logits: [B, K].
        targets: Class indices [B], or shares of the classes [B, K].

    Example:
        >>> softmax_loss(torch.zeros(1, 2), torch.tensor([1]))
        tensor(0.6931)
    """
    check_shape(logits, "B K", "logits")
    return classification.softmax_loss(logits, targets)


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of every class, summed over classes and averaged over images.

    Args:
        logits: [B, K].
        targets: Class indices [B], or shares of the classes [B, K].

    References:
        chen2022 App. E.1.

    Example:
        >>> sigmoid_loss(torch.zeros(1, 2), torch.tensor([1]))  # 2 log 2
        tensor(1.3863)
    """
    check_shape(logits, "B K", "logits")
    return classification.sigmoid_loss(logits, targets)
