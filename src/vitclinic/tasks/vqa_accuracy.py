"""Accuracy of answers as VQA counts it, the targets that belong to it, and its interval over images.

Several people answer a question of VQA. An answer counts in full if three of the others gave it [Antol et al. 2015]:
with c of n people,

    accuracy = (c min((c - 1) / 3, 1) + (n - c) min(c / 3, 1)) / n

the mean over leaving out one person. The target of training is min(c / 3, 1). Where fewer than four people answered,
nobody is left out, and all of up to three count: c / min(n, 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.statistics import Interval, share_interval
from vitclinic.data.text import normalize_answer

AGREEING = 3
"""People that make an answer right."""
KINDS = ("yes_no", "number", "other")
"""Kinds of questions by their answer, as VQA has them."""


def score_answer(given: str, answers: Sequence[str]) -> float:
    """Return the accuracy of an answer, from 0 to 1.

    Args:
        given: The answer to judge.
        answers: What people answered.

    Example:
        >>> score_answer("red", ["red"]), round(score_answer("red", ["red"] * 3 + ["pink"] * 7), 2)
        (1.0, 0.9)
    """
    count, total = _count(answers)[normalize_answer(given)], len(answers)
    if total <= AGREEING:
        return count / total
    left_out, kept = (min(others / AGREEING, 1.0) for others in (count - 1, count))
    return (count * max(left_out, 0.0) + (total - count) * kept) / total


def soft_targets(answers: Sequence[str], numbers: Mapping[str, int]) -> dict[int, float]:
    """Return the target of each known answer to a question, by its number: min(count / 3, 1).

    Args:
        answers: What people answered.
        numbers: The number of each answer that the network can give.

    Example:
        >>> soft_targets(["red", "red", "pink", "teal"], {"red": 0, "pink": 1})
        {0: 0.6666666666666666, 1: 0.3333333333333333}
    """
    enough = min(len(answers), AGREEING)
    found = ((numbers.get(answer), count) for answer, count in _count(answers).items())
    return {number: min(count / enough, 1.0) for number, count in found if number is not None}


def find_kind(answers: Sequence[str]) -> str:
    """Return the kind of a question by the answer that most people gave: `yes_no`, `number` or `other`.

    Example:
        >>> find_kind(["yes"]), find_kind(["two", "2", "3"]), find_kind(["red"])
        ('yes_no', 'number', 'other')
    """
    most = _count(answers).most_common(1)[0][0]
    if most in ("yes", "no"):
        return "yes_no"
    return "number" if most.replace(",", "").replace(".", "", 1).isdecimal() else "other"


def _count(answers: Sequence[str]) -> Counter[str]:
    return Counter(normalize_answer(answer) for answer in answers)


MOMENTS = 6
"""Length of `image_moments`."""


def image_moments(scores: NDArray[np.float64], images: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return sums over images that the interval needs: 1, n, A, n^2, n A, A^2 for n questions with total accuracy A.

    Args:
        scores: The accuracy of each question.
        images: Which image each is about; all questions of an image are there.
    """
    _, rows = np.unique(images, return_inverse=True)
    n = np.bincount(rows).astype(np.float64)
    total = np.bincount(rows, weights=scores)
    return np.array([len(n), n.sum(), total.sum(), n @ n, n @ total, total @ total])


def accuracy_interval(moments: Sequence[float]) -> Interval:
    """Return the 95% interval of the mean accuracy over questions, some of which are about the same image.

    It is Wilson's interval for as many independent questions as have the variance of the ratio of sums over images; of
    answers that are all right, or all wrong, as many as there are images.

    Args:
        moments: Sums of `image_moments`.
    """
    images, questions, total, n_n, n_a, a_a = moments
    share = total / questions
    residual = a_a - 2 * share * n_a + share * share * n_n
    independent = images
    if images > 1 and residual > 1e-12 * questions and 0 < share < 1:
        variance = residual / questions**2 * images / (images - 1)
        independent = min(max(share * (1 - share) / variance, 1.0), questions)
    if not math.isfinite(share):
        return math.nan, math.nan
    return share_interval(share * independent, independent)
