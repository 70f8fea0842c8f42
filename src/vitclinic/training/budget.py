"""The length of a run in steps; `max_time` is converted by measuring what a step costs."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vitclinic._core.distributed import Distributed
from vitclinic._core.time import seconds
from vitclinic.data import Dataset, evaluation_batches
from vitclinic.training.optimizer import in_steps
from vitclinic.training.recipe import DEFAULT_EPOCHS, Recipe
from vitclinic.training.resizing import ImageSizes, Size
from vitclinic.training.trainer import Trainer

_WARM_UP, _MEASURED = 2, 5


@dataclass(frozen=True)
class Cost:
    """Measured times of one run, in seconds."""

    step: float
    image: float
    """Evaluating one image, without gradients."""
    start: float = 0.0
    """Building the network and its trainer."""
    smaller: Sequence[float] = ()
    """A step at each smaller size of `progressive_resizing`, in order; `step` is at full size."""

    def seconds(self, steps: int, recipe: Recipe, counts: Mapping[str, int]) -> float:
        """Estimate the time of `steps` steps with their validations and the test; `counts` has the images per split."""
        epoch = counts["train"] / recipe.batch_size
        interval = max(1.0, in_steps(recipe.validation.every, epoch, steps))
        validated = math.ceil(steps / interval - 1e-9) * counts["val"]
        lengths = recipe.progressive_resizing.lengths(epoch, steps)
        trained = sum(count * cost for count, cost in zip(lengths, [*self.smaller, self.step], strict=True))
        return trained + self.image * (validated + (counts["test"] if recipe.test else 0))

    def steps_within(self, budget: float, recipe: Recipe, counts: Mapping[str, int]) -> int:
        """Return the largest number of steps that fits into `budget` seconds, validations and test included."""
        lengths = range(1, max(0, int(budget / min([*self.smaller, self.step]))) + 1)
        return bisect.bisect_right(lengths, budget, key=lambda steps: self.seconds(steps, recipe, counts))


def image_counts(dataset: Dataset) -> dict[str, int]:
    """Return the number of images in each split."""
    return {split: len(images) for split, images in dataset.splits.items()}


def total_steps(recipe: Recipe, dataset: Dataset, distributed: Distributed, device: torch.device) -> int:
    """Return the number of steps to train for; with `max_time`, as many as the measured cost of a step allows."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.max_time is None:
        epochs = recipe.epochs if recipe.epochs is not None else DEFAULT_EPOCHS
        return max(1, math.ceil(epochs * len(dataset.train) / recipe.batch_size - 1e-9))
    cost = measure_cost(recipe, dataset, distributed, device)
    steps = cost.steps_within(seconds(recipe.max_time), recipe, image_counts(dataset))
    return int(distributed.leader_only(lambda: max(1, steps)))


def measure_cost(recipe: Recipe, dataset: Dataset, distributed: Distributed, device: torch.device) -> Cost:
    """Measure the cost of a single run; see `measure_costs`."""
    return measure_costs([recipe], dataset, distributed, device)[0]


def measure_costs(
    recipes: Sequence[Recipe], dataset: Dataset, distributed: Distributed, device: torch.device
) -> list[Cost]:
    """Measure the costs of several runs on throwaway trainers, so that the runs themselves start fresh.

    The cost of a step is the median of five, after two warm-up steps. The recipes, and the image sizes of each, take
    turns step by step, so that other load on the machine slows all of them equally.
    """
    trainers, starts = [], []
    for recipe in recipes:
        began = time.perf_counter()
        count = len(recipe.progressive_resizing.shares) + 1
        trainers.append(Trainer(recipe, dataset, (_WARM_UP + _MEASURED) * count, distributed, device))
        trainers[-1].sizes = _InTurn(trainers[-1].sizes.sizes)
        starts.append(time.perf_counter() - began)
    times: list[list[float]] = [[] for _ in trainers]
    for _ in range(_WARM_UP + _MEASURED):
        for trainer, taken in zip(trainers, times, strict=True):
            for _ in trainer.sizes.sizes:
                began = time.perf_counter()
                trainer.advance()
                taken.append(time.perf_counter() - began)
    images = [_evaluation_cost(trainer, dataset) / distributed.size for trainer in trainers]
    for trainer in trainers:
        trainer.close()
    steps = [_median_by_size(taken, len(trainer.sizes.sizes)) for trainer, taken in zip(trainers, times, strict=True)]
    return [
        Cost(full, image, start, smaller) for (*smaller, full), image, start in zip(steps, images, starts, strict=True)
    ]


class _InTurn(ImageSizes):
    """Every size in turn, one a step."""

    def __init__(self, sizes: Sequence[Size]) -> None:
        super().__init__(sizes, ends=[])

    def __call__(self, step: int) -> Size:
        return self.sizes[step % len(self.sizes)]


def _median_by_size(taken: Sequence[float], sizes: int) -> list[float]:
    """Return the median time at each size, from the smallest; none is below that of a smaller size, as noise can be.

    So a longer run is never estimated to take less time, however its steps are divided among the sizes.
    """
    medians = [statistics.median(taken[size::sizes][_WARM_UP:]) for size in range(sizes)]
    return list(itertools.accumulate(medians, max))


def _evaluation_cost(trainer: Trainer, dataset: Dataset) -> float:
    """Measure the seconds per image of a forward pass, without gradients."""
    batch = next(evaluation_batches(dataset, "train", trainer.recipe.batch_size)).to(trainer.device, trainer.dtype)
    network = trainer.evaluation_network.eval()
    with torch.no_grad():
        network(batch.images)
        started = time.perf_counter()
        network(batch.images)
        return (time.perf_counter() - started) / len(batch)
