"""Predictions of runs that answer questions about images.

Shapes: P questions, K answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.deployment.images import Asked, Row, make_rows
from vitclinic.deployment.predictor import TOP_K, Decoded, ImagePredictor, Input, Results
from vitclinic.exam.targets import Target

_ASKED = 64
"""Questions that are asked at a time."""


@dataclass
class Answers(Results):
    """Answers to questions about images; an image that several are asked of is there several times.

    Example:
        >>> found = Answers(["a.png"], ("red", "blue"), ["what colour"], np.array([[0.2, 0.9]]))
        >>> found.labels, found.rows(top_k=1)
        (['blue'], [{'file': 'a.png', 'question': 'what colour', 'answer': 'blue', 'score': 0.9}])
    """

    files: list[str]
    classes: tuple[str, ...]
    """The answers that the network can give."""
    questions: list[str]
    scores: NDArray[np.float64]
    """[P, K], from 0 to 1: how right each answer would be; with `task.loss=softmax` they add up to 1."""
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """The best answer to each question."""
        return [self.classes[k] for k in self.scores.argmax(1)] if len(self) else []

    def rows(self, top_k: int = TOP_K, probabilities: bool = False) -> list[Row]:
        """Return a row for each question.

        Args:
            top_k: How many of the best answers to list.
            probabilities: Also list the score of each answer.
        """
        rows = make_rows(self.files, self.scores, self.classes, top_k, probabilities, ("answer", "score", "score"))
        return [
            {"file": row.pop("file"), "question": question, **row}
            for row, question in zip(rows, self.questions, strict=True)
        ]


class AnswerPredictor(ImagePredictor[Answers]):
    """A network that is ready to answer questions; arguments are those of `predict`."""

    results = Answers

    def describe(self, rows: int, out: Path | None) -> str:
        return f"{rows} answer{'s' * (rows != 1)}"

    def __init__(self, target: Target, *, ask: str | Sequence[str] | None = None, **common: Any) -> None:
        self.ask = (ask,) if isinstance(ask, str) else tuple(ask or ())
        if not all(question.strip() for question in self.ask):
            raise RecipeError("'ask' has an empty question.")
        super().__init__(target, **common)
        self._questions: list[tuple[str, ...]] = []

    def check(self, images: Sequence[Input]) -> None:
        self._questions = [one.questions if isinstance(one, Asked) else self.ask for one in images]
        if not all(self._questions):
            raise RecipeError(
                f"'{self.target.name}' answers questions: give one by `ask`, or a table, .csv or .jsonl, with"
                " the columns image and question."
            )

    @torch.inference_mode()
    def read(self, decoded: Decoded) -> Answers:
        pairs = [(row, question) for row, at in enumerate(decoded.places) for question in self._questions[at]]
        assert self.target.run is not None
        softmax = getattr(self.target.run.recipe.task, "loss", None) == "softmax"
        scores = [np.empty((0, len(self.classes)))]
        for start in range(0, len(pairs), _ASKED):
            some = pairs[start : start + _ASKED]
            images = decoded.images[[row for row, _ in some]].to(self.device)
            z_pk = self.network(images, [question for _, question in some]).double()
            if not bool(z_pk.isfinite().all()):
                raise ModelError(f"'{self.target.name}' returns scores that are not finite (NaN or infinity).")
            scores.append((z_pk.softmax(1) if softmax else z_pk.sigmoid()).cpu().numpy())
        files, questions = [decoded.names[row] for row, _ in pairs], [question for _, question in pairs]
        return Answers(files, self.classes, questions, np.concatenate(scores), decoded.skipped)
