"""A network's answer for each image: the classes it finds most probable, and the probability of the label.

Shapes: B images of a batch, K classes, n images, m classes kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data import Batch
from vitclinic.data.split import name_images
from vitclinic.probes.attention.maps import as_bytes
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.probe import Sum, Tally
from vitclinic.probes.subject import Subject

KEPT = 10
"""Most probable classes that are kept of an image: some hundred bytes an image, however many classes there are."""
SIDE = 72
"""Largest side of a thumbnail in pixels; a smaller image stays as it is."""

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of n images, in the order of the split.

    Example:
        >>> Outcomes(*(np.zeros(2, int) for _ in range(2)), np.ones((2, 1), int), np.ones((2, 1)), np.zeros(2)).is_wrong
        array([ True,  True])
    """

    numbers: Numbers
    """Index of each image in the split, [n]."""
    labels: Numbers
    classes: Numbers
    """The m most probable classes of each image, the first of equals first, [n, m]."""
    probabilities: Floats
    """Their probabilities, the softmax of the logits, [n, m]."""
    own: Floats
    """Probability of the label, [n]: the self-confidence."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def predicted(self) -> Numbers:
        """The most probable class, [n]."""
        return self.classes[:, 0]

    @property
    def confidence(self) -> Floats:
        """Its probability, [n]."""
        return self.probabilities[:, 0]

    @property
    def is_wrong(self) -> NDArray[np.bool_]:
        """True where the most probable class is not the label, [n]."""
        return np.asarray(self.predicted != self.labels)

    def take(self, places: Numbers) -> Outcomes:
        """Return the outcomes of some images."""
        return Outcomes(*(getattr(self, field.name)[places] for field in fields(self)))


class OutcomeSum:
    """Outcomes that arrive batch by batch; a `Sum` of a tally."""

    def __init__(self) -> None:
        self._parts: list[Outcomes] = []

    def add(self, batch: Batch, logits: Tensor, name: str) -> None:
        """Add the images of a batch; `name` is the network's, for errors."""
        logits_bk, y_b = check_logits(logits, name).cpu().double(), batch.targets.cpu()
        p_bk = logits_bk.softmax(1)
        order_bm = logits_bk.argsort(dim=1, descending=True, stable=True)[:, :KEPT]
        own = p_bk.gather(1, y_b[:, None])[:, 0]
        found = (batch.indices.cpu(), y_b, order_bm, p_bk.gather(1, order_bm), own)
        self._parts.append(Outcomes(*(tensor.numpy() for tensor in found)))

    def merge(self, other: OutcomeSum) -> None:
        """Add the images of another process."""
        self._parts += other._parts

    def collect(self) -> Outcomes:
        """Return the outcomes of all images, in the order of the split."""
        names = [field.name for field in fields(Outcomes)]
        together = Outcomes(*(np.concatenate([getattr(part, name) for part in self._parts]) for name in names))
        return together.take(np.argsort(together.numbers, kind="stable"))


class OutcomeTally(Tally):
    """Base of the tallies that conclude from the outcomes of all images: `finish` is theirs."""

    def __init__(self, subject: Subject, shown: int) -> None:
        self.subject, self.shown = subject, shown
        self.outcomes = OutcomeSum()

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        self.outcomes.add(batch, logits, self.subject.name)

    def sums(self) -> Mapping[str, Sum]:
        return {"outcomes": self.outcomes}


def rank_within(groups: Numbers, order: Numbers) -> Numbers:
    """Return the rank of each item within its group, from 0, if the items are taken in this order.

    Example:
        >>> rank_within(np.array([7, 7, 3, 7]), np.array([3, 2, 1, 0])).tolist()
        [2, 1, 0, 0]
    """
    by_group = order[np.argsort(groups[order], kind="stable")]
    sorted_groups = groups[by_group]
    starts = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]]) if len(groups) else np.zeros(0, int)
    lengths = np.diff(np.r_[starts, len(groups)])
    ranks = np.empty(len(groups), np.int64)
    ranks[by_group] = np.arange(len(groups)) - np.repeat(starts, lengths)
    return ranks


def show_images(subject: Subject, outcomes: Outcomes) -> dict[str, NDArray[Any]]:
    """Return arrays of a measurement from which a report shows these images: thumbnails, names and what was said.

    Args:
        subject: The network and its images.
        outcomes: Those of the images to show.

    Returns:
        `shown_images` [s, h, w] or [s, h, w, 3] as bytes, or of no image where their pixels were not kept;
        `shown_numbers`, `shown_names`, `shown_labels`, `shown_predicted`, `shown_confidence`, `shown_own` [s].
    """
    return {
        **show_pixels(subject, outcomes.numbers),
        "shown_numbers": outcomes.numbers,
        "shown_labels": outcomes.labels,
        "shown_predicted": outcomes.predicted,
        "shown_confidence": outcomes.confidence,
        "shown_own": outcomes.own,
    }


def show_pixels(subject: Subject, numbers: Numbers) -> dict[str, NDArray[Any]]:
    """Return thumbnails and names of images of the subject's split, as arrays of a measurement."""
    names = name_images(subject.images.take(numbers)) if len(numbers) else []
    return {"shown_images": make_thumbnails(subject, numbers), "shown_names": np.array(names, dtype=np.str_)}


def make_thumbnails(subject: Subject, numbers: Numbers) -> NDArray[np.uint8]:
    """Return small copies of images of the subject's split; none where their pixels were not kept."""
    from PIL import Image

    images = subject.images
    if not len(numbers) or images.rows[numbers].max() >= len(images.images.kept):  # in one's own loop they are gone
        return np.zeros((0, 1, 1), np.uint8)
    factor, size = fit_thumbnail(subject)
    found = []
    for batch in subject.select(numbers.tolist()).batches():
        pixels = as_bytes(batch.images.cpu())
        if factor < 1:
            small = [Image.fromarray(one).resize(size, Image.Resampling.LANCZOS) for one in pixels]
            pixels = np.stack([np.asarray(one) for one in small])
        found.append(pixels)
    return np.concatenate(found)


def fit_thumbnail(subject: Subject) -> tuple[float, tuple[int, int]]:
    """Return the factor by which the subject's images shrink to thumbnails, and the width and height of these."""
    height, width = subject.dataset.size
    factor = min(1.0, SIDE / max(height, width))
    return factor, (max(1, round(width * factor)), max(1, round(height * factor)))


def shrink_masks(subject: Subject, masks: Sequence[Tensor]) -> NDArray[np.uint8]:
    """Return masks [B, H, W] of several batches at the size of thumbnails, each pixel the class of one there."""
    height, width = subject.dataset.size
    _, (columns, rows) = fit_thumbnail(subject)
    down, across = ((np.arange(few) * 2 + 1) * many // (2 * few) for few, many in ((rows, height), (columns, width)))
    if not masks:
        return np.zeros((0, rows, columns), np.uint8)
    return np.concatenate([mask.numpy()[:, down[:, None], across] for mask in masks]).astype(np.uint8)
