"""Labels that are probably wrong, by confident learning [Northcutt, Jiang and Chuang, JAIR 2021].

A network that was not trained on an image, and is sure of another class than its label, doubts the label. How sure is
sure enough differs between classes, so each class has its own threshold:

    t_j   = mean of p_i(j) over the images i that are labelled j
    j*(i) = the most probable class j with p_i(j) >= t_j, if there is one
    label i is suspected where j*(i) exists and is not y_i;  C[y_i, j*(i)] counts

Suspects are ranked by their self-confidence p_i(y_i), the lowest first. The share of wrong labels is estimated by the
off-diagonal of C, each row scaled to the number of images with that label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import share_interval
from vitclinic.data.split import name_images
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.behaviour.outcomes import Floats, Numbers, Outcomes, OutcomeTally, show_images
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Tally, register
from vitclinic.probes.subject import Subject

LISTED = 1000
"""Suspects that a measurement lists; all are counted."""


@register
class LabelErrors(StreamingProbe):
    """Images whose labels are probably wrong, by confident learning (Northcutt et al. 2021).

    t_j = mean of p_i(j) over images labelled j; a label is suspected if another class is the most probable of those
    with p_i(j) >= t_j. Only images that the network was not trained on count: it may have learned wrong labels, too.

    Example:
        >>> import torch
        >>> brightest = torch.nn.Flatten()  # the class is the number of the brightest pixel
        >>> images = (0.1 + 0.9 * torch.eye(4)).reshape(4, 1, 2, 2).repeat(10, 1, 1, 1)
        >>> labels = torch.arange(40) % 4
        >>> labels[5] = 2
        >>> LabelErrors()(brightest, [(images, labels)]).arrays["suspect_numbers"]
        array([5])
    """

    name = "label_errors"
    group = "Behaviour"
    rank = 35
    title = "Suspected label errors"
    question = "Which labels are probably wrong?"
    paper = "Northcutt, Jiang and Chuang 2021 (confident learning)"
    key_scalars: ClassVar[KeyScalars] = {"suspected": None, "wrong_labels": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    on_all_images: ClassVar[bool] = True

    shown: Annotated[int, Field(ge=0)] = Field(48, description="maximum number of images that are kept to be shown")

    def check(self, subject: Subject) -> None:
        own = subject.run is not None and subject.run.data_facts.get("digest") == subject.dataset.digest
        if own and subject.split == "train":
            raise DoesNotApply(
                "the network was trained on these labels and may have learned the wrong ones. Use the split val or"
                " test; for all labels, train on one half and examine the other, and the reverse."
            )

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the source of the images: the list has their files."""
        return {"source": subject.dataset.name}

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject, self.shown)


class _Tally(OutcomeTally):
    def finish(self) -> Result:
        outcomes, names = self.outcomes.collect(), self.subject.classes
        check_better_than_guessing(outcomes)
        found = find_suspects(outcomes, len(names))
        listed = found.places[:LISTED]
        images = self.subject.images.take(outcomes.numbers[listed])
        scalars = {
            "suspected": Scalar(value=float(len(found.places)), n=len(outcomes)),
            "suspected_share": share(len(found.places), len(outcomes)),
            "wrong_labels": Scalar(value=found.wrong_share, n=len(outcomes)),
        }
        arrays = {
            "classes": np.array(names, dtype=np.str_),
            "suspect_numbers": outcomes.numbers[listed],
            "suspect_names": np.array(name_images(images), dtype=np.str_),
            "suspect_labels": outcomes.labels[listed],
            "suspect_suggested": found.suggested[:LISTED],
            "suspect_score": outcomes.own[listed],
            "thresholds": found.thresholds,
        }
        return Result(scalars, arrays={**arrays, **show_images(self.subject, outcomes.take(listed[: self.shown]))})


def check_better_than_guessing(outcomes: Outcomes) -> None:
    """Raise `DoesNotApply` if the accuracy is not above the share of the commonest label.

    Such a network cannot judge labels: it would suspect nearly all of them.
    """
    right, n = int((~outcomes.is_wrong).sum()), len(outcomes)
    commonest = int(np.bincount(outcomes.labels).max())
    if share_interval(right, n)[0] <= commonest / n:
        raise DoesNotApply(
            f"the network is no better than guessing here ({right} of {n} images are right, and {commonest} have the"
            " commonest label), so it cannot judge labels."
        )


@dataclass(frozen=True)
class Suspects:
    """Images whose labels are suspected, the least self-confident first."""

    places: Numbers
    """Their places among all images."""
    suggested: Numbers
    """The class that each probably has."""
    thresholds: Floats
    """t_j of each class; NaN of a class without images."""
    wrong_share: float
    """Estimated share of wrong labels among all images."""


def find_suspects(outcomes: Outcomes, classes: int) -> Suspects:
    """Find suspected labels, as the top of this file says; p of classes below the m that are kept counts as 0.

    A class outside of the m most probable ones of an image is above its threshold only if that is below 1/(m + 1).
    """
    images = np.bincount(outcomes.labels, minlength=classes)
    with np.errstate(invalid="ignore"):
        thresholds = np.bincount(outcomes.labels, outcomes.own, classes) / np.where(images, images, np.nan)
    # A mean of equal numbers may be above each of them in the last digit.
    sure_nm = outcomes.probabilities >= thresholds[outcomes.classes] * (1 - 1e-12)
    places = np.arange(len(outcomes))
    guess = np.where(sure_nm.any(1), outcomes.classes[places, sure_nm.argmax(1)], -1)
    suspected = np.flatnonzero((guess >= 0) & (guess != outcomes.labels))
    order = suspected[np.argsort(outcomes.own[suspected], kind="stable")]
    return Suspects(order, guess[order], thresholds, _wrong_share(outcomes.labels, guess, images))


def _wrong_share(labels: Numbers, guess: Numbers, images: Numbers) -> float:
    """Return the off-diagonal share of the counts C, each row scaled to the images with that label."""
    counted = np.bincount(labels[guess >= 0], minlength=len(images))
    wrong = np.bincount(labels[(guess >= 0) & (guess != labels)], minlength=len(images))
    return float((wrong / np.maximum(counted, 1) * images).sum() / images.sum())
