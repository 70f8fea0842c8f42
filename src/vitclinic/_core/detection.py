"""Average precision of detections, as COCO counts it, from matches that are made once per image.

At an overlap threshold t, the detections of a class in an image take, by falling score, the free object that they
overlap most, and at least by t. The precision of a class at recall r is the best of any score at which at least r of
its objects are found; its AP is the mean of that over r = 0, 0.01, ..., 1. `ap` is the mean over classes and over t =
0.5, 0.55, ..., 0.95; `ap50` and `ap75` have one t. What is found in a crowd counts neither as right nor as wrong.

A match belongs to an image alone, so that images can be weighted: a bootstrap draws weights, and matches nothing again.

Shapes: d detections and g objects of an image, K classes, T thresholds, n detections of a class in all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Labels = NDArray[np.int64]

THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
"""Overlaps from which on a detection has found an object."""
MOST_DETECTIONS = 100
"""Detections of a class in an image that count, those of the highest scores."""
_RECALLS: Floats = np.linspace(0.0, 1.0, 101)
_AT_50, _AT_75 = 0, 5


def box_overlaps(found: Floats, objects: Floats, crowd: Flags) -> Floats:
    """Return the overlap of each detection with each object, [d, g].

    It is intersection over union; for a crowd region, intersection over the area of the detection.

    Args:
        found: Boxes [d, 4]: left, top, right, bottom.
        objects: Boxes [g, 4].
        crowd: Which objects are crowd regions, [g].

    Example:
        >>> box = np.array([[0.0, 0.0, 2.0, 2.0]])
        >>> box_overlaps(box, box + [[1.0, 0.0, 1.0, 0.0]], np.array([False])).round(3)
        array([[0.333]])
    """
    low = np.maximum(found[:, None, :2], objects[None, :, :2])
    high = np.minimum(found[:, None, 2:], objects[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (found, objects)]
    return _divide(common, areas[0], areas[1], crowd)


def mask_overlaps(found: Flags, objects: Flags, crowd: Flags) -> Floats:
    """Return the overlap of each mask [d, height, width] with that of each object, [d, g], as `box_overlaps` does."""
    flat = [masks.reshape(len(masks), int(np.prod(masks.shape[1:]))) for masks in (found, objects)]
    common = flat[0].astype(np.float32) @ flat[1].astype(np.float32).T
    areas = [masks.sum(1).astype(np.float64) for masks in flat]
    return _divide(common.astype(np.float64), areas[0], areas[1], crowd)


def _divide(common: Floats, found: Floats, objects: Floats, crowd: Flags) -> Floats:
    union = np.where(crowd[None], found[:, None], found[:, None] + objects[None] - common)
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=union > 0))


@dataclass(frozen=True)
class Matches:
    """The detections of one image, matched to its objects."""

    labels: Labels
    """[d], by falling score within a class."""
    scores: Floats
    """[d]."""
    right: Flags
    """[T, d], true if it has found an object."""
    ignored: Flags
    """[T, d], true if it counts neither as right nor as wrong."""
    objects: Labels
    """[K], the objects of each class that are to be found."""


def match_objects(
    overlaps: Floats, labels: Labels, scores: Floats, object_labels: Labels, crowd: Flags, classes: int
) -> Matches:
    """Match the detections of one image to its objects at each of `THRESHOLDS`.

    Args:
        overlaps: Overlap of each detection with each object, [d, g].
        labels: Classes of the detections, [d].
        scores: Their scores, [d].
        object_labels: Classes of the objects, [g].
        crowd: Which objects are crowd regions, [g].
        classes: The number of classes.
    """
    parts = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        rows = rows[np.argsort(-scores[rows], kind="stable")][:MOST_DETECTIONS]
        of_class = np.flatnonzero(object_labels == label)
        of_class = of_class[np.argsort(crowd[of_class], kind="stable")]
        found = overlaps[np.ix_(rows, of_class)]
        parts.append((rows, *_match_class(found, crowd[of_class])))
    rows = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, np.int64)
    right, ignored = (
        np.concatenate([part[number] for part in parts], axis=1) if parts else np.zeros((len(THRESHOLDS), 0), bool)
        for number in (1, 2)
    )
    objects = np.bincount(object_labels[~crowd], minlength=classes).astype(np.int64)
    return Matches(labels[rows], scores[rows], right, ignored, objects)


def _match_class(overlaps: Floats, crowd: Flags) -> tuple[Flags, Flags]:
    """Return which detections [d] are right, and which are ignored, [T, d] each; objects come before crowd regions."""
    right, ignored = (np.zeros((len(THRESHOLDS), len(overlaps)), bool) for _ in range(2))
    single = int((~crowd).sum())
    free, every = np.ones((len(THRESHOLDS), single), bool), np.arange(len(THRESHOLDS))
    for row, found in enumerate(overlaps):
        if single:
            open_to_it = np.where(free, found[:single], -1.0)
            # Of equal overlaps the last object is taken, as COCO's own evaluation does.
            best = single - 1 - open_to_it[:, ::-1].argmax(1)
            right[:, row] = open_to_it[every, best] >= THRESHOLDS
            free[every[right[:, row]], best[right[:, row]]] = False
        if len(crowd) > single:
            ignored[:, row] = ~right[:, row] & (found[single:].max() >= THRESHOLDS)
    return right, ignored


class Detections:
    """The matched detections of many images, of which any may be weighted.

    Args:
        images: The matches of each image.
        classes: The number of classes.

    Example:
        >>> box, label, no_crowd = np.array([[0.0, 0.0, 4.0, 4.0]]), np.zeros(1, np.int64), np.array([False])
        >>> overlaps = box_overlaps(box, box, no_crowd)
        >>> one = match_objects(overlaps, label, np.array([0.9]), label, no_crowd, classes=1)
        >>> Detections([one], 1).average_precision().mean()
        np.float64(1.0)
    """

    def __init__(self, images: Sequence[Matches], classes: int) -> None:
        self.objects = np.stack([image.objects for image in images]) if images else np.zeros((0, classes), np.int64)
        empty = np.zeros((len(THRESHOLDS), 0), bool)
        labels = np.concatenate([np.zeros(0, np.int64), *(image.labels for image in images)])
        scores = np.concatenate([np.zeros(0), *(image.scores for image in images)])
        right = np.concatenate([empty, *(image.right for image in images)], axis=1)
        ignored = np.concatenate([empty, *(image.ignored for image in images)], axis=1)
        owner = np.repeat(np.arange(len(images)), [len(image.labels) for image in images])
        self._of_class = []
        for label in range(classes):
            rows = np.flatnonzero(labels == label)
            rows = rows[np.argsort(-scores[rows], kind="stable")]
            self._of_class.append((owner[rows], right[:, rows], ignored[:, rows]))

    def average_precision(self, weights: NDArray[np.generic] | None = None) -> Floats:
        """Return the AP of each class at each threshold, [K, T]; NaN for classes without objects.

        Args:
            weights: How often each image counts; once, by default.
        """
        share: Floats = np.ones(len(self.objects)) if weights is None else np.asarray(weights, np.float64)
        counts = share @ self.objects
        found = [
            _interpolate(right, ignored, share[owner], count)
            for (owner, right, ignored), count in zip(self._of_class, counts, strict=True)
        ]
        return np.stack(found)

    def bootstrap(self, draws: int, seed: int) -> Floats:
        """Return `summarize_precision` of `draws` samples of the images, drawn with replacement, [draws, 3]."""
        random, count = np.random.default_rng(seed), len(self.objects)
        samples = (random.multinomial(count, np.full(count, 1 / count)) for _ in range(draws))
        return np.stack([np.array(summarize_precision(self.average_precision(sample))) for sample in samples])


def _interpolate(right: Flags, ignored: Flags, weights: Floats, objects: float) -> Floats:
    """Return the AP of a class at each threshold, [T], from its detections by falling score."""
    if not objects:
        return np.full(len(right), np.nan)
    true = np.cumsum(np.where(right & ~ignored, weights, 0.0), axis=1)
    false = np.cumsum(np.where(~right & ~ignored, weights, 0.0), axis=1)
    precision = true / np.maximum(true + false, 1e-12)  # before the first that counts, 0
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    best = np.concatenate([best, np.zeros((len(best), 1))], axis=1)  # a recall that is not reached
    at = [np.searchsorted(row, _RECALLS, side="left") for row in true / objects]
    return np.array([row[where].mean() for row, where in zip(best, at, strict=True)])


def summarize_precision(precision: Floats) -> tuple[float, float, float]:
    """Return `ap`, `ap50` and `ap75` from the AP of each class at each threshold; NaN if no class has an object."""
    there = precision[~np.isnan(precision).any(1)]
    if not len(there):
        return np.nan, np.nan, np.nan
    return float(there.mean()), float(there[:, _AT_50].mean()), float(there[:, _AT_75].mean())


def name_precision(precision: Floats, classes: Sequence[str]) -> dict[str, float | None]:
    """Return the AP of each class by its name, from that at each threshold [K, T]; None without objects.

    Example:
        >>> name_precision(np.array([[0.5, 0.3], [np.nan, np.nan]]), ["star", "heart"])
        {'star': 0.4, 'heart': None}
    """
    means = precision.mean(1).tolist()
    return {name: None if np.isnan(mean) else mean for name, mean in zip(classes, means, strict=True)}
