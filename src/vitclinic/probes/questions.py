"""Questions about the images of a subject, for probes of networks that answer them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data import Batch
from vitclinic.data.annotations import Question
from vitclinic.models import Normalized
from vitclinic.models.questions import Answerer
from vitclinic.probes.subject import Subject, find_headed
from vitclinic.tasks.vqa_criterion import ask_all

Asked = tuple[Batch, list[Question], NDArray[np.int64], Tensor]
"""A batch, the questions about its images, the row of the image of each, and the scores of the answers [P, K]."""

NO_QUESTIONS = "the network takes images alone; questions are for runs of the task vqa."


def find_answerer(subject: Subject) -> Normalized:
    """Return the subject's network, if it answers questions and its data has some; else it does not apply."""
    return find_headed(subject, Answerer, "questions", NO_QUESTIONS)


def count_questions(subject: Subject) -> int:
    """Return the number of questions about the subject's images; 0 if the data has none."""
    if subject.images.annotations is None:
        return 0
    return sum(len(annotation.questions) for annotation in subject.images.annotate(np.arange(len(subject))))


def ask_questions(subject: Subject) -> Iterator[Asked]:
    """Ask all questions about the subject's images, batch by batch."""
    network = find_answerer(subject)
    with torch.no_grad():
        for batch in subject.batches():
            yield (batch, *ask_all(network, batch))
            subject.progress(subject.name, int(batch.indices[-1]) + 1, len(subject))
