"""Confusion of classes, and the images that the network is most wrong about."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import share_interval
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.behaviour.outcomes import Numbers, Outcomes, OutcomeTally, rank_within, show_images
from vitclinic.probes.probe import Need, Result, StreamingProbe, Tally, register
from vitclinic.probes.subject import Subject

PER_PAIR = 6
"""Images of one pair of classes, or of one class, that are shown at most."""
FOR_PAIRS = 0.75
"""Share of the shown images that is chosen by pairs of classes; the rest is chosen for the worst classes."""
_Z = 1.959964


@register
class Errors(StreamingProbe):
    """Confusion matrix and accuracy of each class, with the images of the most confident errors.

    balanced_accuracy = mean over classes of the accuracy of their images.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> measurement = Errors()(model, [(torch.rand(8, 3, 32, 32), torch.arange(8))])
        >>> measurement.arrays["pair_images"].sum(), measurement.arrays["class_images"].shape
        (np.int64(8), (10,))
    """

    name = "errors"
    group = "Behaviour"
    rank = 15
    title = "Errors as images"
    question = "Which classes are taken for which, and what do these images look like?"
    paper = "Hastie et al. 2009, Sec. 9.2 (confusion matrix); Brodersen et al. 2010 (balanced accuracy)"
    key_scalars: ClassVar[KeyScalars] = {"balanced_accuracy": "higher", "worst_class_accuracy": "higher"}
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    on_all_images: ClassVar[bool] = True

    shown: Annotated[int, Field(ge=0)] = Field(160, description="maximum number of images that are kept to be shown")

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject, self.shown)


class _Tally(OutcomeTally):
    def finish(self) -> Result:
        outcomes, names = self.outcomes.collect(), self.subject.classes
        images = np.bincount(outcomes.labels, minlength=len(names))
        correct = np.bincount(outcomes.labels[~outcomes.is_wrong], minlength=len(names))
        pairs, counts = count_pairs(outcomes)
        chosen = choose_shown(outcomes, self.shown)
        arrays = {
            "classes": np.array(names, dtype=np.str_),
            "class_images": images,
            "class_correct": correct,
            "pairs": pairs,
            "pair_images": counts,
        }
        return Result(
            class_scalars(images, correct), arrays={**arrays, **show_images(self.subject, outcomes.take(chosen))}
        )


def count_pairs(outcomes: Outcomes) -> tuple[Numbers, Numbers]:
    """Return the cells of the confusion matrix that are not 0: (label, predicted class) [m, 2], and images [m]."""
    both = np.stack([outcomes.labels, outcomes.predicted], axis=1)
    pairs, counts = np.unique(both, axis=0, return_counts=True)
    return pairs, counts.astype(np.int64)


def class_scalars(images: Numbers, correct: Numbers) -> dict[str, Scalar]:
    """Return the scalars of a network from the images of each class, and how many of them are right.

    The interval of the worst class holds for the lowest accuracy of any class: it is made of intervals of all classes
    that hold together (Bonferroni), since which class is the worst is not known beforehand.
    """
    present = images > 0
    n, right = images[present], correct[present]
    accuracy = right / n
    smoothed = (right + 1) / (n + 2)  # so that a class without errors is not taken as known exactly
    half = _Z * math.sqrt(float((smoothed * (1 - smoothed) / n).sum())) / len(n)
    balanced = float(accuracy.mean())
    level = 1 - 0.05 / len(n)
    ends = [share_interval(int(k), int(m), level) for k, m in zip(right, n, strict=True)]
    return {
        "balanced_accuracy": Scalar(
            value=balanced, low=max(0.0, balanced - half), high=min(1.0, balanced + half), n=int(n.sum())
        ),
        "worst_class_accuracy": Scalar(
            value=float(accuracy.min()), low=min(low for low, _ in ends), high=min(high for _, high in ends)
        ),
        "error_rate": share(int(n.sum() - right.sum()), int(n.sum())),
        "classes": Scalar(value=float(len(n))),
    }


def choose_shown(outcomes: Outcomes, most: int) -> Numbers:
    """Return places of wrong images to show: the most confident ones of the most confused pairs, then of classes.

    Pairs take turns, the largest first, so that every pair has an image before any has two.
    """
    wrong = np.flatnonzero(outcomes.is_wrong)
    by_confidence = np.argsort(-outcomes.confidence[wrong], kind="stable")
    labels, predicted = outcomes.labels[wrong], outcomes.predicted[wrong]
    _, pairs = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_inverse=True)
    pairs = pairs.reshape(-1)
    by_pair = _take_turns(pairs, -np.bincount(pairs), by_confidence)
    images = np.bincount(outcomes.labels)
    error_rate = np.bincount(labels, minlength=len(images)) / np.maximum(images, 1)
    by_class = _take_turns(labels, -error_rate, by_confidence)
    wanted = np.r_[by_pair[: math.ceil(most * FOR_PAIRS)], by_class]
    _, first = np.unique(wanted, return_index=True)
    return np.sort(wrong[wanted[np.sort(first)][:most]])


def _take_turns(groups: Numbers, priority: NDArray[np.generic], order: Numbers) -> Numbers:
    """Return the places of all items in the order of their rank in their group, groups of lower `priority` first."""
    ranks = rank_within(groups, order)
    turns = np.lexsort((groups, priority[groups], ranks))
    return turns[ranks[turns] < PER_PAIR]
