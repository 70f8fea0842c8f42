"""Accuracy, likelihood and calibration of the predictions [park2022 Fig. F.1; Guo et al., ICML 2017].

    nll  = 1/n sum_i -log p_i(y_i)
    ece  = sum_b n_b/n |accuracy_b - confidence_b|

with p the softmax of the logits, and bins b of equal width of the confidence max_k p_i(k), open below, closed above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean, share_interval
from vitclinic.data import Batch
from vitclinic.probes.behaviour.intervals import mean, share
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.probe import Need, Result, StreamingProbe, Sum, Tally, register
from vitclinic.probes.subject import Subject

_SIMULATED = 4000
"""Simulated draws: enough for three digits of the interval."""


@register
class Accuracy(StreamingProbe):
    """Top-1 and top-5 accuracy, NLL, calibration error and reliability diagram [park2022 Fig. F.1].

    nll = 1/n sum_i -log p_i(y_i), and ece = sum_b n_b/n |accuracy_b - confidence_b| over bins b of the confidence
    [Guo et al. 2017].

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> Accuracy()(model, loader).scalars["accuracy"].n
        8
    """

    name = "accuracy"
    group = "Behaviour"
    rank = 10
    title = "Accuracy and calibration"
    question = "How often is the network right, and does it know when it is?"
    paper = "Park and Kim 2022, Fig. F.1a (P13); Guo et al. 2017"
    key_scalars: ClassVar[KeyScalars] = {
        "accuracy": "higher",
        "top5_accuracy": "higher",
        "nll": "lower",
        "ece": "lower",
    }
    revision: ClassVar[int] = 3  # the interval of the ECE
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    on_all_images: ClassVar[bool] = True

    bins: Annotated[int, Field(ge=1)] = Field(15, description="number of bins of the confidence")

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject, self.bins)


class Reliability:
    """Accuracy against confidence, in bins of equal width; sums over images that do not depend on batches."""

    def __init__(self, bins: int) -> None:
        self.counts: NDArray[np.int64] = np.zeros(bins, np.int64)
        self.correct: NDArray[np.int64] = np.zeros(bins, np.int64)
        self.confidence: NDArray[np.float64] = np.zeros(bins)
        self.squares: NDArray[np.float64] = np.zeros(bins)
        """Sum of (correct - confidence)^2, for the interval."""
        self.chance: NDArray[np.float64] = np.zeros(bins)
        """Sum of confidence (1 - confidence): the variance of a bin's gap if the network were calibrated."""

    def add(self, confidence: NDArray[np.float64], correct: NDArray[np.bool_]) -> None:
        bins = len(self.counts)
        at = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
        self.counts += np.bincount(at, minlength=bins)
        self.correct += np.bincount(at[correct], minlength=bins)
        self.confidence += np.bincount(at, confidence, bins)
        self.squares += np.bincount(at, (correct - confidence) ** 2, bins)
        self.chance += np.bincount(at, confidence * (1 - confidence), bins)

    def merge(self, other: Reliability) -> None:
        """Add the images of another process."""
        self.counts += other.counts
        self.correct += other.correct
        self.confidence += other.confidence
        self.squares += other.squares
        self.chance += other.chance

    @property
    def gap(self) -> float:
        """ECE, sum_b n_b/n |accuracy_b - confidence_b|."""
        return float(np.abs(self.correct - self.confidence).sum() / int(self.counts.sum()))

    def error(self) -> Scalar:
        """Return the ECE with its interval.

        The ECE is the mean over images of s_b (correct - confidence), where s_b is the sign of the gap of its bin. The
        upper end is that of the t interval of this mean, with fixed signs. Since gaps of either sign add up, the ECE of
        a calibrated network is above 0, too; so the lower end is below the value by at least the ECE that chance alone
        produces.
        """
        n, value = int(self.counts.sum()), self.gap
        if n < 2:
            return Scalar(value=value, n=n)
        from scipy.special import stdtrit  # imported here, since it takes a tenth of a second

        variance = max(0.0, float(self.squares.sum()) - n * value**2) / (n - 1)
        half = float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)
        below = max(half, self._by_chance())
        return Scalar(value=value, low=max(0.0, value - below), high=min(1.0, value + half), n=n)

    def _by_chance(self) -> float:
        """Return the 97.5% quantile of the ECE of a calibrated network with these confidences, by simulation."""
        deviation = np.sqrt(self.chance[self.counts > 0].clip(0))
        random = np.random.default_rng(0)
        draws = (np.abs(random.standard_normal((100, len(deviation)))) @ deviation for _ in range(_SIMULATED // 100))
        return float(np.quantile(np.concatenate(list(draws)), 0.975) / self.counts.sum())

    def diagram(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays of the reliability diagram, [bins]; NaN for empty bins."""
        filled = np.where(self.counts > 0, self.counts, np.nan)
        pairs = zip(self.correct.tolist(), self.counts.tolist(), strict=True)
        low, high = np.array([share_interval(*pair) if pair[1] else (np.nan, np.nan) for pair in pairs]).T
        return {
            "bin_edges": np.linspace(0, 1, len(self.counts) + 1),
            "bin_images": self.counts.copy(),
            "bin_confidence": self.confidence / filled,
            "bin_accuracy": self.correct / filled,
            "bin_accuracy_low": low,
            "bin_accuracy_high": high,
        }


class Hits:
    """Number of images with their label first, and among the first five."""

    def __init__(self) -> None:
        self.first = self.fifth = 0

    def add(self, rank: Tensor) -> None:
        self.first += int((rank == 0).sum())
        self.fifth += int((rank < 5).sum())

    def merge(self, other: Hits) -> None:
        """Add the images of another process."""
        self.first += other.first
        self.fifth += other.fifth


class _Tally(Tally):
    def __init__(self, subject: Subject, bins: int) -> None:
        self.subject = subject
        self.outputs = subject.outputs
        self.hits = Hits()
        self.nll, self.confidence = RunningMean(), RunningMean()
        self.reliability = Reliability(bins)

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        logits_bk, y_b = check_logits(logits, self.subject.name).cpu().double(), batch.targets.cpu()
        rank = ranks(logits_bk, y_b)
        self.hits.add(rank)
        log_p = logits_bk.log_softmax(1)
        confidence = log_p.amax(1).exp().numpy()
        self.nll.add(-log_p.gather(1, y_b[:, None])[:, 0].numpy())
        self.confidence.add(confidence)
        self.reliability.add(confidence, (rank == 0).numpy())

    def sums(self) -> Mapping[str, Sum]:
        return {
            "hits": self.hits,
            "nll": self.nll,
            "confidence": self.confidence,
            "reliability": self.reliability,
        }

    def finish(self) -> Result:
        n = self.nll.n
        scalars = {"accuracy": share(self.hits.first, n)}
        if self.outputs > 5:  # with five classes or fewer, top-5 is always right
            scalars["top5_accuracy"] = share(self.hits.fifth, n)
        scalars["nll"] = mean(self.nll, 0.0)
        scalars["ece"] = self.reliability.error()
        scalars["confidence"] = mean(self.confidence, 0.0, 1.0)
        labels = self.subject.images.labels
        scalars["commonest"] = Scalar(value=float(np.bincount(labels).max() / len(labels)))
        return Result(scalars, arrays=self.reliability.diagram())


def ranks(logits_bk: Tensor, y_b: Tensor) -> Tensor:
    """Return the number of classes that rank before the label, [B]; ties go to the first class, as in argmax."""
    own = logits_bk.gather(1, y_b[:, None])
    earlier = torch.arange(logits_bk.shape[1]) < y_b[:, None]
    return ((logits_bk > own) | ((logits_bk == own) & earlier)).sum(1)
