"""The length of a run in steps, and the size of a network that fits it; `max_time` is converted by measuring a step."""

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
from vitclinic.models.hybrid import AUTO
from vitclinic.training.recipe import DEFAULT_EPOCHS, Recipe
from vitclinic.training.resizing import ImageSizes
from vitclinic.training.schedule import in_steps
from vitclinic.training.trainer import Trainer

_WARM_UP, _MEASURED = 2, 5
_PRETENDED = 10_000
"""The length of the run that a throwaway trainer believes to be in."""


@dataclass(frozen=True)
class Cost:
    """Measured times of one run, in seconds."""

    step: float
    """One step at full size, on average over the kinds of steps that the run makes there."""
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
        images = recipe.task.evaluation_images
        validated = math.ceil(steps / interval - 1e-9) * images(counts, "val") if counts["val"] else 0
        lengths = recipe.progressive_resizing.lengths(epoch, steps)
        trained = sum(count * cost for count, cost in zip(lengths, [*self.smaller, self.step], strict=True))
        tested = images(counts, "test") if recipe.test and counts["test"] else 0
        return trained + self.image * (validated + tested)

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


WANTED_EPOCHS = 12.0
"""A larger network must see every image so many times within `max_time`; a rule of thumb, not measured yet."""
_COSTS = {"tiny": 1.0, "small": 3.6, "base": 13.4}
"""Multiply-adds of each size at 32 x 32 pixels relative to the smallest, which stand for the time of a step."""
_LEAST_IMAGES = {"tiny": 0, "small": 20_000, "base": 200_000}
"""The number of training images from which on a size is chosen, for runs without `max_time`."""


def fit_size(
    recipe: Recipe, dataset: Dataset, distributed: Distributed, device: torch.device
) -> tuple[Recipe, list[str]]:
    """Return the recipe with `model.size: auto` replaced by the size that data and time allow, and why.

    With `max_time` that is the largest size that sees every image `WANTED_EPOCHS` times, from the measured cost of the
    smallest; otherwise it depends on the number of images.
    """
    if recipe.model.keywords.get("size") != AUTO:
        return recipe, []
    images = len(dataset.train)
    if recipe.max_time is None:
        fitted = fit_size_to_images(recipe, images)
        return fitted, [f"model.size is {fitted.model.keywords['size']}, for {images:,} training images"]
    epochs = total_steps(_with_size(recipe, "tiny"), dataset, distributed, device) * recipe.batch_size / images
    size = [size for size, cost in _COSTS.items() if cost == 1 or epochs / cost >= WANTED_EPOCHS][-1]
    reason = f"{recipe.max_time} allow about {epochs / _COSTS[size]:.0f} epochs of it on {images:,} training images"
    return _with_size(recipe, size), [f"model.size is {size}: {reason}"]


def fit_size_to_images(recipe: Recipe, images: int) -> Recipe:
    """Return the recipe with `model.size: auto` replaced by the size for so many training images, whatever the time."""
    if recipe.model.keywords.get("size") != AUTO:
        return recipe
    return _with_size(recipe, [size for size, least in _LEAST_IMAGES.items() if images >= least][-1])


def _with_size(recipe: Recipe, size: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"size": size})})


def measure_cost(recipe: Recipe, dataset: Dataset, distributed: Distributed, device: torch.device) -> Cost:
    """Measure the cost of a single run; see `measure_costs`."""
    return measure_costs([recipe], dataset, distributed, device)[0]


def measure_costs(
    recipes: Sequence[Recipe], dataset: Dataset, distributed: Distributed, device: torch.device
) -> list[Cost]:
    """Measure the costs of several runs on throwaway trainers, so that the runs themselves start fresh.

    The cost of a step is the median of five, after two warm-up steps. Steps of several kinds (SAM's and plain ones) are
    weighted by their share of the run, at each size of the images. All take turns step by step, so that other load on
    the machine slows them equally.
    """
    trainers, starts = [], []
    for recipe in recipes:
        began = time.perf_counter()
        trainers.append(Trainer(recipe, dataset, _PRETENDED, distributed, device))
        starts.append(time.perf_counter() - began)
    shares = [_kind_shares(trainer) for trainer in trainers]
    steps = [_mean_by_size(taken, of_run) for taken, of_run in zip(_time_steps(trainers), shares, strict=True)]
    images = [_evaluation_cost(trainer, dataset) / distributed.size for trainer in trainers]
    for trainer in trainers:
        trainer.close()
    return [
        Cost(full, image, start, smaller) for (*smaller, full), image, start in zip(steps, images, starts, strict=True)
    ]


def _kind_shares(trainer: Trainer) -> list[list[float]]:
    """Return, for each size of the images, the share of its steps that each kind of step has; late rules come last."""
    kinds, late_from = trainer.step_kinds(), trainer.rule_start
    borders = [0, *trainer.sizes.ends, trainer.total_steps]
    shares = []
    for begin, end in itertools.pairwise(borders):
        early = min(1.0, max(0.0, (late_from * trainer.total_steps - begin) / max(1, end - begin)))
        late = [(1 - early) * share / max(1e-9, 1 - late_from) for share, _ in (kinds[1:] if late_from else kinds)]
        shares.append([early, *late] if late_from else late)
    return shares


def _time_steps(trainers: Sequence[Trainer]) -> list[list[list[list[float]]]]:
    """Return the seconds of steps of each trainer by size and kind, in turn."""
    kinds = [trainer.step_kinds() for trainer in trainers]
    sizes = [list(trainer.sizes.sizes) for trainer in trainers]
    taken: list[list[list[list[float]]]] = [
        [[[] for _ in of_run] for _ in pixels] for of_run, pixels in zip(kinds, sizes, strict=True)
    ]
    for _ in range(_WARM_UP + _MEASURED):
        for trainer, of_run, pixels, times in zip(trainers, kinds, sizes, taken, strict=True):
            for size, by_kind in zip(pixels, times, strict=True):
                trainer.sizes = ImageSizes([size, pixels[-1]], ends=[trainer.total_steps])
                for (_, rule), seconds_taken in zip(of_run, by_kind, strict=True):
                    began = time.perf_counter()
                    trainer.advance(rule)
                    seconds_taken.append(time.perf_counter() - began)
    return taken


def _mean_by_size(taken: Sequence[Sequence[Sequence[float]]], shares: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of a step at each size, from the smallest; none is below that of a smaller size, as noise can be.

    So a longer run is never estimated to take less time, however its steps are divided among the sizes.
    """
    means = [
        sum(share * statistics.median(times[_WARM_UP:]) for share, times in zip(of_size, by_kind, strict=True))
        for of_size, by_kind in zip(shares, taken, strict=True)
    ]
    return list(itertools.accumulate(means, max))


def _evaluation_cost(trainer: Trainer, dataset: Dataset) -> float:
    """Measure the seconds per image of a forward pass, without gradients."""
    batch = next(evaluation_batches(dataset, "train", trainer.recipe.batch_size)).to(trainer.device, trainer.dtype)
    with torch.no_grad(), trainer.evaluation() as network:
        network.eval()
        network(batch.images)
        started = time.perf_counter()
        network(batch.images)
        return (time.perf_counter() - started) / len(batch)
