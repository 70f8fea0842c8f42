"""Visual question answering: an answer to a question about an image [hyeonwoo2023 Sec. 4.7].

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vitclinic._core.errors import RecipeError
from vitclinic.tasks.task import BATCH_SIZE, Metric, Score, Task, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Augment, Batch, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Losses

_UNFIT = ("randaugment", "erasing", "mixup", "cutmix", "smoothing")
"""Parts of the augmentation that change what is asked for, or make targets."""
_POOLING = ("gap_head", "sequence_pooling")
_QUESTIONS_PER_IMAGE = 8
"""Questions that are asked of an image at once, for the size of batches in evaluation."""


@register
class Vqa(Task):
    """Visual question answering by ViLT, with any ViT as its transformer: words and patches are tokens of one sequence.

    A step asks `questions` of each image, drawn with the image; validation asks all of them. Scores have `accuracy` as
    VQA counts it, with its 95% interval over images, that of questions answered by yes or no (`accuracy_yes_no`), by a
    number and otherwise, and `answer_loss`. `count` is the number of images, `questions` that of their questions.

    Attributes:
        loss: `sigmoid` (binary cross-entropy of every answer, as ViLT's) or `softmax` (with targets that add up to 1).
        questions: Questions about an image in a step, whose patches are made once for all of them.
    """

    name = "vqa"
    title = "visual question answering"
    paper = "hyeonwoo2023 Sec. 4.7, Table 10"
    metrics = (
        Metric("accuracy", share=True, interval=True),
        Metric("accuracy_yes_no", share=True, headline=False),
        Metric("accuracy_number", share=True, headline=False),
        Metric("accuracy_other", share=True, headline=False),
        Metric("answer_loss"),
    )
    selects = "accuracy"
    loss_metric = "answer_loss"
    target = "questions"
    default_source = "scenes"

    loss: Literal["sigmoid", "softmax"] = Field("sigmoid", description="sigmoid (every answer by itself) or softmax")
    questions: Annotated[int, Field(ge=1)] = Field(1, description="questions about each image in a step")

    def check(self, recipe: Recipe) -> None:
        """Refuse what has no meaning for questions."""
        augment = recipe.data.augment.resolve()
        made = [part for part in _UNFIT if getattr(augment, part) not in (None, 0, "off")]
        if made:
            raise ValueError(f"the task vqa takes no data.augment.{made[0]}: choose the level light or none")
        if recipe.progressive_resizing.shares:
            raise ValueError("the task vqa reads images at one size: remove progressive_resizing")
        if recipe.compile:
            raise ValueError("compile is not for the task vqa: remove it")
        for treatment in recipe.treatments:
            if treatment.name in _POOLING:
                raise ValueError(
                    f"the treatment {treatment.name} changes how patches are pooled, and the task vqa reads the answer"
                    " from the first word: remove one of the two"
                )

    def num_outputs(self, spec: ImageSpec) -> int:
        return 0

    def attach(self, backbone: nn.Module, spec: ImageSpec) -> nn.Module:
        from vitclinic.models.questions import Answerer
        from vitclinic.tasks.vqa_criterion import check_join

        assert spec.text is not None
        network = Answerer(backbone, spec.text, spec.num_classes)
        check_join(network, spec)
        return network

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.tasks.vqa_criterion import QuestionStream

        if augment.flip and (count := _count_sides(dataset)):
            raise RecipeError(
                f"{count:,} training questions speak of left or right, which mirrored images swap: set"
                " data.augment.flip=false."
            )
        return QuestionStream(dataset, augment, seed, self.questions)

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion:
        from vitclinic.tasks.vqa_criterion import AnswerCriterion

        return AnswerCriterion(self.loss)

    def evaluation_images(self, counts: Mapping[str, int], split: str) -> int:
        return counts[split] * _QUESTIONS_PER_IMAGE

    def notices(self, dataset: Dataset) -> list[str]:
        from vitclinic.tasks.vqa_criterion import find_unheeded

        return find_unheeded(dataset)

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        raise TypeError("The losses of the task vqa are those of its criterion.")

    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        raise TypeError("The metrics of the task vqa need the answers of the data.")

    def summarize(self, sums: list[float]) -> Score:
        from vitclinic.tasks.vqa_accuracy import KINDS, MOMENTS, accuracy_interval

        _, questions, total, *_ = sums[:MOMENTS]
        low, high = accuracy_interval(sums[:MOMENTS])
        loss, *parts = sums[MOMENTS:]
        counts, right = parts[: len(KINDS)], parts[len(KINDS) :]
        by_kind = {
            f"accuracy_{kind}": part / count for kind, count, part in zip(KINDS, counts, right, strict=True) if count
        }
        return {
            "accuracy": total / questions,
            "accuracy_low": low,
            "accuracy_high": high,
            **by_kind,
            **{f"count_{kind}": int(count) for kind, count in zip(KINDS, counts, strict=True)},
            "answer_loss": loss / questions,
            "questions": int(questions),
            "count": int(sums[0]),
        }

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        import torch

        from vitclinic.anatomy import eval_mode
        from vitclinic.data import evaluation_batches
        from vitclinic.tasks.vqa_criterion import sum_scores

        images = max(1, batch_size // _QUESTIONS_PER_IMAGE)
        with torch.no_grad(), eval_mode(network):
            own = evaluation_batches(dataset, split, images, distributed.rank, distributed.size)
            sums = distributed.sum(lambda: sum_scores(network, own, dataset.classes, self.loss))
        return self.summarize(sums.tolist())


def _count_sides(dataset: Dataset) -> int:
    """Return the number of training questions that speak of left or right."""
    import numpy as np

    from vitclinic.data.text import split_words

    if dataset.train.annotations is None:  # described, not read
        return 0
    found = dataset.train.annotate(np.arange(len(dataset.train)))
    texts = (question.text for annotation in found for question in annotation.questions)
    return sum(not {"left", "right"}.isdisjoint(split_words(text)) for text in texts)
