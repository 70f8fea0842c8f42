"""Intersection over union of each class of pixels, and the images whose masks are worst.

Shapes: n images, K classes, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.segmentation import class_iou, count_batch, mean_iou, resample_counts
from vitclinic.data import Batch
from vitclinic.models import Normalized
from vitclinic.models.segmenter import Segmenter, read_masks, score_pixels
from vitclinic.probes.behaviour.outcomes import show_pixels, shrink_masks
from vitclinic.probes.probe import OwningProbe, Result, register
from vitclinic.probes.subject import Subject, find_headed

_NO_MASKS = "the network does not predict the class of each pixel; masks are for runs of the task segmentation."
_QUANTILES = (0.025, 0.975)


@register
class SegmentationAccuracy(OwningProbe):
    """Mean IoU of the classes of pixels with its interval over images, and the worst images beside their masks.

    IoU of a class is the number of pixels that prediction and truth share over the number that either has, all images
    together; void pixels count nowhere. The interval is a bootstrap over images.
    """

    name = "segmentation"
    group = "Behaviour"
    rank = 45
    title = "Masks"
    question = "How well do predicted masks cover the classes of pixels, and which images are worst?"
    paper = "Hyeon-Woo et al. 2023, Table 6"
    key_scalars: ClassVar[KeyScalars] = {"miou": "higher", "pixel_accuracy": "higher", "nll": "lower"}

    shown: Annotated[int, Field(ge=0)] = Field(36, description="maximum number of images that are kept to be shown")

    def check(self, subject: Subject) -> None:
        find_segmenter(subject)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def measure(self, subject: Subject) -> Result:
        counts, nll = _count(subject)
        drawn, n = resample_counts(counts, subject.seed), len(counts)

        def scalar(value: Any, samples: NDArray[np.float64]) -> Scalar:
            low, high = np.nanquantile(samples, _QUANTILES)
            return Scalar(value=float(value), low=float(low), high=float(high), n=n)

        scalars = {
            "miou": scalar(mean_iou(counts.sum(0)), mean_iou(drawn)),
            "pixel_accuracy": scalar(_share_right(counts.sum(0)), _share_right(drawn)),
            "nll": Scalar(value=nll, n=n),
        }
        arrays: dict[str, NDArray[Any]] = {
            "classes": np.array(subject.classes, dtype=np.str_),
            "class_iou": class_iou(counts.sum(0)),
            "class_iou_low": _quantiles(class_iou(drawn), _QUANTILES[0]),
            "class_iou_high": _quantiles(class_iou(drawn), _QUANTILES[1]),
            "class_images": (counts[:, 2] > 0).sum(0),
            "image_iou": mean_iou(counts),
        }
        return Result(scalars, arrays={**arrays, **self._show(subject, arrays["image_iou"])})

    def _show(self, subject: Subject, image_iou: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Return the images of the smallest mean IoU with what was predicted of them; all-void images are left out."""
        worst = np.argsort(image_iou, kind="stable")[: self.shown]
        worst = worst[~np.isnan(image_iou[worst])]
        predicted, truth = [], []
        for batch, scores in _scored(subject.select(worst.tolist())) if len(worst) else ():
            predicted.append(scores.argmax(1).byte().cpu())
            truth.append(read_masks(batch).cpu())
        return {
            **show_pixels(subject, worst),
            "shown_predicted": shrink_masks(subject, predicted),
            "shown_truth": shrink_masks(subject, truth),
            "shown_iou": image_iou[worst],
        }


def _scored(subject: Subject) -> Iterator[tuple[Batch, Tensor]]:
    network = find_segmenter(subject)
    segmenter = network.backbone
    assert isinstance(segmenter, Segmenter)
    return score_pixels(network, subject.dataset, subject.split, segmenter.window, subject.batch_size)


def find_segmenter(subject: Subject) -> Normalized:
    """Return the subject's network, if it predicts masks and its data has some; else the probe does not apply."""
    return find_headed(subject, Segmenter, "mask", _NO_MASKS)


def _count(subject: Subject) -> tuple[NDArray[np.int64], float]:
    """Return the counts of all images [n, 3, K], and the mean cross-entropy of their known pixels."""
    parts = []
    for batch, scores in _scored(subject):
        parts.append(count_batch(scores, read_masks(batch), len(subject.classes)))
        subject.progress(subject.name, int(batch.indices[-1]) + 1, len(subject))
    nll = sum(part[1] for part in parts) / max(1, sum(part[2] for part in parts))
    return np.concatenate([part[0] for part in parts]), nll


def _share_right(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of known pixels whose class is right, from counts [..., 3, K]."""
    both, _, true = np.moveaxis(counts.astype(np.float64), -2, 0)
    return np.asarray(both.sum(-1) / np.maximum(1, true.sum(-1)))


def _quantiles(samples: NDArray[np.float64], at: float) -> NDArray[np.float64]:
    """Return the quantile of each column; NaN for one that has no numbers."""
    return np.array([np.nan if np.isnan(column).all() else np.nanquantile(column, at) for column in samples.T])
