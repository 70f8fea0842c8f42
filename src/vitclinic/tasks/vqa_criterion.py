"""Training and scoring of a network that answers questions (`models.questions.Answerer`), in torch.

Shapes: B images, P pairs of an image and a question, K answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, VitclinicError, first_line
from vitclinic._core.precision import upcast
from vitclinic.anatomy import eval_mode
from vitclinic.data import Augment, Batch, Dataset, ImageSpec, TrainingStream
from vitclinic.data.annotations import Annotations, Question
from vitclinic.data.randomness import uniforms
from vitclinic.models.questions import Answerer
from vitclinic.tasks.criterion import Criterion
from vitclinic.tasks.vqa_accuracy import KINDS, MOMENTS, find_kind, image_moments, score_answer, soft_targets

if TYPE_CHECKING:
    from vitclinic.treatments import Losses


class QuestionStream(TrainingStream):
    """Training samples of Q questions each, drawn from those of the image by the sample's key; targets are [B, Q * K].

    An image with fewer questions than that is asked some again.
    """

    def __init__(self, dataset: Dataset, augment: Augment, seed: int, questions: int = 1) -> None:
        super().__init__(dataset, augment, seed)
        self.numbers = {answer: number for number, answer in enumerate(dataset.classes)}
        self.questions = questions

    @property
    def has_soft_targets(self) -> bool:
        return True

    def __getitem__(self, places: range) -> Batch:
        batch = super().__getitem__(places)
        assert batch.annotations is not None
        draws_bq = uniforms(batch.keys.numpy().view(np.uint64), "question", self.questions).tolist()
        drawn = tuple(
            _draw_questions(of_image, draws)
            for of_image, draws in zip(batch.annotations.questions, draws_bq, strict=True)
        )
        targets_pk = targets_of([question for of_image in drawn for question in of_image], self.numbers)
        targets = targets_pk.reshape(len(drawn), -1)
        return replace(batch, targets=targets, annotations=Annotations(questions=drawn))


def _draw_questions(among: Sequence[Question], draws: Sequence[float]) -> tuple[Question, ...]:
    """Return a question for each draw in [0, 1); none comes again before all have been asked."""
    found: list[Question] = []
    left: list[Question] = []
    for draw in draws:
        left = left or list(among)
        found.append(left.pop(int(draw * len(left))))
    return tuple(found)


def targets_of(questions: Sequence[Question], numbers: dict[str, int]) -> Tensor:
    """Return the soft targets of questions, [P, K]."""
    targets = torch.zeros(len(questions), len(numbers))
    for row, question in enumerate(questions):
        for number, share in soft_targets(question.answers, numbers).items():
            targets[row, number] = share
    return targets


def answer_losses(scores_pk: Tensor, targets_pk: Tensor, loss: str) -> Tensor:
    """Return the loss of each pair, [P]: summed over answers (`sigmoid`), or with targets that add up to 1 (`softmax`).

    A question none of whose answers is known has no softmax loss.
    """
    scores_pk = upcast(scores_pk)
    targets_pk = targets_pk.to(scores_pk)
    if loss == "sigmoid":
        return F.binary_cross_entropy_with_logits(scores_pk, targets_pk, reduction="none").sum(1)
    shares = targets_pk / targets_pk.sum(1, keepdim=True).clamp_min(1e-9)
    return -(shares * scores_pk.log_softmax(1)).sum(1)


class AnswerCriterion(Criterion):
    """The loss of a batch of pairs, a mean over them.

    Args:
        loss: `sigmoid` or `softmax`.
    """

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        assert batch.annotations is not None
        questions = batch.annotations.questions
        scores_pk = network(batch.images, [question.text for of_image in questions for question in of_image])
        targets_pk = batch.targets.reshape(scores_pk.shape)
        return scores_pk, {"task": answer_losses(scores_pk, targets_pk, self.loss).mean()}


def ask_all(network: nn.Module, batch: Batch) -> tuple[list[Question], np.ndarray[Any, Any], Tensor]:
    """Ask all questions about the images of a batch.

    Returns:
        The questions, the row of the image of each, and the scores of the answers [P, K].
    """
    assert batch.annotations is not None
    pairs = [(row, question) for row, found in enumerate(batch.annotations.questions) for question in found]
    rows = np.array([row for row, _ in pairs], dtype=np.int64)
    questions = [question for _, question in pairs]
    images = batch.images[torch.from_numpy(rows).to(batch.images.device)]
    return questions, rows, network(images, [question.text for question in questions])


def sum_scores(network: nn.Module, batches: Iterator[Batch], answers: Sequence[str], loss: str) -> Tensor:
    """Return the sums over all questions about a process's images that `Vqa.summarize` takes, in float64."""
    parameter = next(network.parameters())
    numbers = {answer: number for number, answer in enumerate(answers)}
    total = np.zeros(MOMENTS + 1 + 2 * len(KINDS))
    for batch in batches:
        questions, rows, scores_pk = ask_all(network, batch.to(parameter.device, parameter.dtype))
        given = scores_pk.argmax(1).tolist()
        right = np.array([score_answer(answers[best], q.answers) for best, q in zip(given, questions, strict=True)])
        losses = answer_losses(scores_pk.double(), targets_of(questions, numbers).to(parameter.device), loss)
        kinds = np.array([KINDS.index(find_kind(question.answers)) for question in questions])
        counts = np.bincount(kinds, minlength=len(KINDS))
        by_kind = np.bincount(kinds, weights=right, minlength=len(KINDS))
        total += np.concatenate([image_moments(right, rows), [float(losses.sum())], counts, by_kind])
    return torch.from_numpy(total).to(parameter.device)


def check_join(network: Answerer, spec: ImageSpec) -> None:
    """Raise a ModelError if the blocks of a treated ViT do not take words beside patches."""
    like = next(network.parameters())
    images = torch.full((2, spec.in_chans, *spec.img_size), 0.5, dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad(), eval_mode(network):
            network(images, ["", ""])
    except (VitclinicError, RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        reason = first_line(error)
        raise ModelError(
            f"The network does not take words beside its patches ({reason}): remove the treatment that counts on"
            " patches alone."
        ) from error


def find_unheeded(dataset: Dataset) -> list[str]:
    """Return sentences on questions of the data that cannot be answered right, or are not read to their end."""
    notices, known = [], set(dataset.classes)
    for split, part in dataset.splits.items():
        if part.annotations is None or not len(part) or dataset.text is None:
            continue
        questions = [q for found in part.annotate(np.arange(len(part))) for q in found.questions]
        if beyond := sum(not soft_targets(q.answers, dict.fromkeys(known, 0)) for q in questions):
            notices.append(
                f"{beyond:,} of {len(questions):,} {split} questions have no answer among the {len(known):,} of the"
                " training questions: they count, as wrong"
            )
        if cut := sum(dataset.text.is_cut(question.text) for question in questions):
            notices.append(f"{cut:,} {split} questions are longer than {dataset.text.length - 2} words, and are cut")
    return notices
