"""`max_time`: from a time to a number of steps, by the measured cost of a step."""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vitclinic.data import Dataset, evaluation_batches
from vitclinic.durations import seconds
from vitclinic.training.distributed import World
from vitclinic.training.loop import Trainer
from vitclinic.training.recipe import DEFAULT_EPOCHS, Recipe
from vitclinic.training.schedule import in_steps

_WARM_UP, _MEASURED = 2, 5


@dataclass(frozen=True)
class Cost:
    """What the parts of a run take, in seconds."""

    step: float
    image: float
    """To score one image, without gradients."""
    start: float = 0.0
    """To build the network and what trains it."""

    def seconds(self, steps: int, recipe: Recipe, counts: Mapping[str, int]) -> float:
        """`steps` steps, the validations between them and the final test; `counts` are the images of the splits."""
        interval = max(1.0, in_steps(recipe.validation.every, counts["train"] / recipe.batch_size, steps))
        validated = math.ceil(steps / interval - 1e-9) * counts["val"]
        return steps * self.step + self.image * (validated + (counts["test"] if recipe.test else 0))

    def steps_within(self, budget: float, recipe: Recipe, counts: Mapping[str, int]) -> int:
        """The most steps that, with their validations and the test, fit into `budget` seconds."""
        lengths = range(1, max(0, int(budget / self.step)) + 1)
        return bisect.bisect_right(lengths, budget, key=lambda steps: self.seconds(steps, recipe, counts))


def image_counts(dataset: Dataset) -> dict[str, int]:
    """How many images each split has."""
    return {split: len(images) for split, images in dataset.splits.items()}


def total_steps(recipe: Recipe, dataset: Dataset, world: World, device: torch.device) -> int:
    """How many steps the recipe asks for; with `max_time`, how many the measured cost of a step allows."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.max_time is None:
        epochs = recipe.epochs if recipe.epochs is not None else DEFAULT_EPOCHS
        return max(1, math.ceil(epochs * len(dataset.train) / recipe.batch_size - 1e-9))
    cost = measure_cost(recipe, dataset, world, device)
    steps = cost.steps_within(seconds(recipe.max_time), recipe, image_counts(dataset))
    return int(world.agree(max(1, steps)))


def measure_cost(recipe: Recipe, dataset: Dataset, world: World, device: torch.device) -> Cost:
    """The cost of a run's parts, on a trainer of its own, which is then thrown away: the run itself starts untouched.

    A step's is the median of five, after two to warm up.
    """
    began = time.perf_counter()
    trainer = Trainer(recipe, dataset, _WARM_UP + _MEASURED, world, device)
    start = time.perf_counter() - began
    times = []
    for _ in range(trainer.total_steps):
        started = time.perf_counter()
        trainer.advance()
        times.append(time.perf_counter() - started)
    image = _evaluation_cost(trainer, dataset) / world.size
    trainer.close()
    return Cost(statistics.median(times[_WARM_UP:]), image, start)


def _evaluation_cost(trainer: Trainer, dataset: Dataset) -> float:
    """Seconds an image, without gradients."""
    batch = next(evaluation_batches(dataset, "train", trainer.recipe.batch_size)).to(trainer.device, trainer.dtype)
    network = trainer.evaluated.eval()
    with torch.no_grad():
        network(batch.images)
        started = time.perf_counter()
        network(batch.images)
        return (time.perf_counter() - started) / len(batch)
