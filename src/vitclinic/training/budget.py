"""`max_time`: from a time to a number of steps, measured once."""

from __future__ import annotations

import bisect
import math
import statistics
import time

import torch

from vitclinic.data import Dataset, evaluation_batches
from vitclinic.durations import seconds
from vitclinic.training.distributed import World
from vitclinic.training.loop import Trainer
from vitclinic.training.recipe import DEFAULT_EPOCHS, Recipe
from vitclinic.training.schedule import in_steps

_WARM_UP, _MEASURED = 2, 5


def total_steps(recipe: Recipe, dataset: Dataset, world: World, device: torch.device) -> int:
    """How many steps the recipe asks for; with `max_time`, how many the measured cost of a step allows."""
    if recipe.steps is not None:
        return recipe.steps
    if recipe.max_time is None:
        epochs = recipe.epochs if recipe.epochs is not None else DEFAULT_EPOCHS
        return max(1, math.ceil(epochs * len(dataset.train) / recipe.batch_size - 1e-9))
    return int(world.agree(_steps_within(seconds(recipe.max_time), recipe, dataset, world, device)))


def _steps_within(budget: float, recipe: Recipe, dataset: Dataset, world: World, device: torch.device) -> int:
    """Steps, with the validations between them and the final test, that fit into `budget` seconds.

    The cost is measured on a trainer of its own, which is then thrown away: the run itself starts untouched.
    """
    trainer = Trainer(recipe, dataset, _WARM_UP + _MEASURED, world, device)
    times = []
    for _ in range(trainer.total_steps):
        started = time.perf_counter()
        trainer.advance()
        times.append(time.perf_counter() - started)
    step_cost = statistics.median(times[_WARM_UP:])
    image_cost = _evaluation_cost(trainer, dataset) / world.size

    def cost(steps: int) -> float:
        interval = max(1.0, in_steps(recipe.validation.every, trainer.steps_per_epoch, steps))
        validations = steps / interval + 1
        return steps * step_cost + image_cost * (validations * len(dataset.val) + len(dataset.test))

    return max(1, bisect.bisect_right(range(1, int(budget / step_cost) + 1), budget, key=cost))


def _evaluation_cost(trainer: Trainer, dataset: Dataset) -> float:
    """Seconds an image, without gradients."""
    batch = next(evaluation_batches(dataset, "train", trainer.recipe.batch_size)).to(trainer.device, trainer.dtype)
    network = trainer.evaluated.eval()
    with torch.no_grad():
        network(batch.images)
        started = time.perf_counter()
        network(batch.images)
        return (time.perf_counter() - started) / len(batch)
