"""The verb `predict`: what a network says of new images; here their classes, elsewhere masks, boxes and answers.

Probabilities are those of the softmax at a temperature that fits the run's val images (`calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.deployment.annotate import Boxes, BoxPredictor, MaskPredictor, Masks
from vitclinic.deployment.answers import AnswerPredictor, Answers
from vitclinic.deployment.calibration import calibrate
from vitclinic.deployment.images import Row, find_inputs, make_rows
from vitclinic.deployment.predictor import BATCH_SIZE, TOP_K, Decoded, ImagePredictor, Results
from vitclinic.exam.targets import Network, Target
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.output import are_probabilities, are_sigmoids, observe_output
from vitclinic.tasks import Task
from vitclinic.tasks.representation import Representation
from vitclinic.training import Checkpoint, Run
from vitclinic.training.run import find_run

Images = str | Path | Image.Image | Sequence[str | Path | Image.Image]


@dataclass
class Predictions(Results):
    """The probabilities of the classes of some images, most useful as `labels`, `rows()` or a file.

    Example:
        >>> found = Predictions(["a.png"], ("cat", "dog"), np.array([[0.2, 0.8]]))
        >>> found.labels, len(found)
        (['dog'], 1)
    """

    files: list[str]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    """[images, classes]."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why some images could not be read, by file."""
    temperature: float = 1.0

    @property
    def labels(self) -> list[str]:
        """The likeliest class of each image."""
        return [self.classes[k] for k in self.probabilities.argmax(1)] if len(self) else []

    def rows(self, top_k: int = TOP_K, probabilities: bool = False) -> list[Row]:
        """Return a row for each image, as they stand in a file.

        Args:
            top_k: How many of the likeliest classes to list.
            probabilities: Also list the probability of each class.
        """
        return list(make_rows(self.files, self.probabilities, self.classes, top_k, probabilities))


def predict(
    target: Target,
    images: Images,
    *,
    ask: str | Sequence[str] | None = None,
    min_score: float | None = None,
    temperature: float | None = None,
    size: int | None = None,
    batch_size: int = BATCH_SIZE,
    workers: int | None = None,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
) -> Predictions | Masks | Boxes | Answers:
    """Predict the classes of images, or what else the run was trained for.

    Args:
        target: A run, one of its checkpoints, a network, or what `vitclinic examine` takes.
        images: A file, a folder, a pattern such as `photos/*.jpg`, an image of Pillow's, or a list of these; for a run
            of task vqa also a table, .csv or .jsonl, with the columns `image` and `question`.
        ask: For a run of task vqa: the question, or questions, to ask of each image.
        min_score: For a run of task detection: leave out objects with a lower score; 0.5 unless given.
        temperature: Of the softmax; by default the one that fits the run's val images, and 1 for other networks.
        size: Pixels a side, for networks that take any.
        batch_size: Images at a time.
        workers: Processes that decode images; by default as many as there are spare CPUs, none for a few images.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        callbacks: Objects that follow the progress.

    Returns:
        `Predictions`, the probabilities by image; `Masks` of a run of task segmentation, `Boxes` of task detection,
        `Answers` of task vqa. All have `files`, the images that could not be read (`skipped`), `rows()` and `write()`.

    Raises:
        DataError: There is no such image, or none can be read.
        RecipeError: An option is not for this task, or an image is neither a path nor one of Pillow's.
        ModelError: The network does not classify images of this size.

    Example:
        >>> found = predict("runs/photos", "new/*.jpg")  # doctest: +SKIP
        >>> found.labels  # doctest: +SKIP
        ['cat', 'dog']
    """
    task = _find_task(target)
    asks = task is not None and task.target == "questions"
    listed = [images] if isinstance(images, str | Path | Image.Image) else list(images)
    for one in listed:
        if not isinstance(one, str | Path | Image.Image):
            raise RecipeError(
                f"predict() takes paths and images of Pillow's (got {type(one).__name__}); for tensors, call the"
                " network: load_model(run)(images)."
            )
    inputs = [
        one for word in listed for one in ([word] if isinstance(word, Image.Image) else find_inputs([word], asks))
    ]
    predictor = open_predictor(
        target,
        ask=ask,
        min_score=min_score,
        temperature=temperature,
        size=size,
        device=device,
        callback=CallbackList(callbacks),
    )
    found: Predictions | Masks | Boxes | Answers = predictor.collect(inputs, batch_size, workers)
    return found


_OPTIONS = {"class": "temperature", "objects": "min_score", "questions": "ask"}
"""The option of each kind of target that the others do not have."""
_FITTING = {"temperature": "classification", "min_score": "detection", "ask": "vqa"}


def open_predictor(
    target: Target,
    *,
    ask: str | Sequence[str] | None = None,
    min_score: float | None = None,
    temperature: float | None = None,
    **common: Any,
) -> ImagePredictor[Any]:
    """Return what predicts images of a target, by its task; arguments are those of `predict`."""
    task, name = _find_task(target), target.path if isinstance(target, Run) else target
    kind = "class" if task is None else task.target
    if isinstance(task, Representation):
        raise RecipeError(
            f"'{name}' was trained for {task.name}, so that it returns features and no classes; the verb features"
            " writes them."
        )
    if task is not None and kind == "class" and task.name != "classification":
        raise RecipeError(f"'{name}' was trained for {task.name}, which predict does not support: use load_model.")
    given = {"temperature": temperature, "min_score": min_score, "ask": ask}
    for option, value in given.items():
        if value is not None and _OPTIONS.get(kind) != option:
            what = "is not a run" if task is None else f"was trained for {task.name}"
            raise RecipeError(f"'{option}' is for runs of the task {_FITTING[option]}, and '{name}' {what}; remove it.")
    if kind == "mask":
        return MaskPredictor(target, **common)
    if kind == "objects":
        return BoxPredictor(target, min_score=min_score, **common)
    if kind == "questions":
        return AnswerPredictor(target, ask=ask, **common)
    return Predictor(target, temperature=temperature, **common)


def _find_task(target: Target) -> Task | None:
    if isinstance(target, str | Path):
        found = find_run(str(target))
        return None if found is None else Run.open(found[0]).recipe.task
    run = target.run if isinstance(target, Checkpoint) else target
    return run.recipe.task if isinstance(run, Run) else None


class Predictor(ImagePredictor[Predictions]):
    """A network that is ready to classify images; arguments are those of `predict`."""

    results = Predictions

    def __init__(self, target: Target, *, temperature: float | None = None, **common: Any) -> None:
        if temperature is not None and not temperature > 0:
            raise RecipeError(f"'temperature' must be above 0 (got {temperature}).")
        super().__init__(target, **common)
        height, width = self.preprocessing.size
        example = torch.full((1, self.preprocessing.channels, height, width), 0.5, device=self.device)
        output = observe_output(self.network, example, name=f"'{self.target.name}'")
        if output.features is not None:
            raise ModelError(f"'{self.target.name}' returns {output.features}, not classes.")
        self.network = output.network.eval()
        self.classes = _name_classes(self.target, output.count)
        self._given = temperature

    @cached_property
    def temperature(self) -> float:
        """The divisor of the logits."""
        if self._given is not None or self.target.run is None:
            return 1.0 if self._given is None else self._given
        return float(calibrate(self.target, self.network, self.device, self.callback)["temperature"])

    @property
    def facts(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def describe(self, rows: int, out: Path | None) -> str:
        return f"temperature {self.temperature:.3g}"

    def prepare(self) -> None:
        self.temperature  # noqa: B018  (fitted before the workers start)

    def read(self, decoded: Decoded) -> Predictions:
        probabilities = np.empty((0, len(self.classes)))
        if decoded.names:
            probabilities = self._classify(decoded.images)
        return Predictions(decoded.names, self.classes, probabilities, decoded.skipped, self.temperature)

    @torch.inference_mode()
    def _classify(self, images: Tensor) -> NDArray[np.float64]:
        scores = check_logits(self.network(images.to(self.device)), self.target.name).double().cpu()
        if len(scores) > 1 and are_probabilities(scores):
            raise ModelError(f"'{self.target.name}' returns probabilities; predict needs the logits before them.")
        if len(scores) > 1 and are_sigmoids(scores):
            raise ModelError(
                f"'{self.target.name}' returns a sigmoid of each class; predict needs logits of one class."
            )
        probabilities: NDArray[np.float64] = (scores / self.temperature).softmax(1).numpy()
        return probabilities


def _name_classes(target: Network, count: int) -> tuple[str, ...]:
    named = target.output_names or getattr(target.network, "classes", None)
    config = getattr(getattr(target.network, "backbone", target.network), "config", None)
    labels = getattr(config, "id2label", None) or {}
    if named is None and len(labels) == count:  # Hugging Face's networks know their classes
        named = tuple(str(labels[k]) for k in sorted(labels))
    return named if named is not None and len(named) == count else tuple(str(k) for k in range(count))
