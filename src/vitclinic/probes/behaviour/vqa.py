"""Accuracy of the answers to questions about images, by kind of question, and the worst answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.data.text import split_words
from vitclinic.probes.behaviour.outcomes import show_pixels
from vitclinic.probes.probe import OwningProbe, Result, register
from vitclinic.probes.questions import ask_questions, count_questions, find_answerer
from vitclinic.probes.subject import Subject
from vitclinic.tasks.vqa_accuracy import KINDS, accuracy_interval, find_kind, image_moments, score_answer


@dataclass(frozen=True)
class _Answer:
    """The answer to one question."""

    image: int
    question: str
    given: str
    truth: tuple[str, ...]
    score: float
    confidence: float


@register
class VqaAccuracy(OwningProbe):
    """Accuracy of answers as VQA counts it, by kind of question, with the worst answers beside their images.

    With c of n people who gave the answer, (c min((c - 1) / 3, 1) + (n - c) min(c / 3, 1)) / n, the mean over leaving
    out one person; c / n of up to three people. The interval takes questions of one image as dependent.
    """

    name = "vqa"
    group = "Behaviour"
    rank = 5
    title = "Answers to questions"
    question = "How often is the answer to a question about an image right, and which are the worst?"
    paper = "Antol et al. 2015; Hyeon-Woo et al. 2023, Table 10"
    key_scalars: ClassVar[KeyScalars] = {
        "accuracy": "higher",
        "accuracy_yes_no": "higher",
        "accuracy_number": "higher",
        "accuracy_other": "higher",
    }

    shown: Annotated[int, Field(ge=0)] = Field(60, description="maximum number of answers that are kept to be shown")

    def check(self, subject: Subject) -> None:
        find_answerer(subject)

    def forwards(self, subject: Subject) -> float:
        return float(count_questions(subject))

    def measure(self, subject: Subject) -> Result:
        answers = _collect(subject)
        scores = np.array([answer.score for answer in answers])
        images = np.array([answer.image for answer in answers])
        kinds = np.array([find_kind(answer.truth) for answer in answers])
        scalars = {"accuracy": _mean(scores, images)}
        for kind in KINDS:
            if (kinds == kind).any():
                scalars[f"accuracy_{kind}"] = _mean(scores[kinds == kind], images[kinds == kind])
        scalars["questions"] = Scalar(value=float(len(answers)))
        return Result(scalars, arrays={**_by_beginning(answers, scores), **self._show(subject, answers)})

    def _show(self, subject: Subject, answers: Sequence[_Answer]) -> dict[str, NDArray[Any]]:
        """Return the worst answers, the surest of equals first, with their images."""
        worst = sorted(answers, key=lambda answer: (answer.score, -answer.confidence))[: self.shown]
        numbers = np.array([answer.image for answer in worst], dtype=np.int64)
        return {
            **show_pixels(subject, numbers),
            "shown_questions": np.array([answer.question for answer in worst], dtype=np.str_),
            "shown_given": np.array([answer.given for answer in worst], dtype=np.str_),
            "shown_truth": np.array([", ".join(dict.fromkeys(answer.truth)) for answer in worst], dtype=np.str_),
            "shown_scores": np.array([answer.score for answer in worst]),
            "shown_confidence": np.array([answer.confidence for answer in worst]),
        }


def _collect(subject: Subject) -> list[_Answer]:
    names = find_answerer(subject).classes or subject.classes
    found = []
    for batch, questions, rows, scores_pk in ask_questions(subject):
        confidence, best = scores_pk.double().softmax(1).max(1)
        indices = batch.indices.numpy()[rows].tolist()
        for at, question in enumerate(questions):
            given = names[int(best[at])]
            score = score_answer(given, question.answers)
            found.append(_Answer(indices[at], question.text, given, question.answers, score, float(confidence[at])))
    return found


def _mean(scores: NDArray[np.float64], images: NDArray[np.int64]) -> Scalar:
    moments = image_moments(scores, images).tolist()
    low, high = accuracy_interval(moments)
    return Scalar(value=float(scores.mean()), low=low, high=high, n=int(moments[0]))


def _by_beginning(answers: Sequence[_Answer], scores: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return questions and accuracy by the first two words of a question, the most frequent first."""
    beginnings = np.array([" ".join(split_words(answer.question)[:2]) for answer in answers], dtype=np.str_)
    names, rows = np.unique(beginnings, return_inverse=True)
    counts = np.bincount(rows)
    order = np.argsort(-counts, kind="stable")
    accuracy = np.bincount(rows, weights=scores) / counts
    return {"beginnings": names[order], "beginning_questions": counts[order], "beginning_accuracy": accuracy[order]}
