"""The dry run of a study: build every network and count FLOPs, without images and without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import ImageSpec
from vitclinic.experiments.study.catalogue import data_facts, open_study
from vitclinic.experiments.study.schema import Scale, ScaleName, Study
from vitclinic.experiments.study.verdicts import estimate_power
from vitclinic.models.cost import count_flops
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.network import create_network
from vitclinic.training.overrides import Overrides
from vitclinic.training.recipe import DEFAULT_EPOCHS

GPU_PEAK = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12}
"""FLOP/s of an A100 by its data sheet, for each precision."""
GPU_SHARE = 0.4
"""Share of the peak that training is taken to reach. Large networks do; small ones on small images reach far less."""
TWO_CORES = 45e9
"""FLOP/s of two processes, one on each core: six runs of small ViTs made 22.4e9 each."""
ASSUMPTION = "one A100 at 40% of its peak in the recipe's precision (not measured; small networks reach less)"


@dataclass(frozen=True)
class ArmCost:
    """The cost of one arm, for one seed."""

    arm: str
    model: str
    classes: int
    size: tuple[int, int]
    parameters: int
    steps: int
    images: int
    """Seen in training, all epochs together."""
    flops: float
    """FLOPs of the training: two for each multiply-add, three forward passes per image for a plain step, as many more
    as the task and the treatments take, and smaller images (`progressive_resizing`) by their area."""
    gpu_hours: float
    """Estimated by `ASSUMPTION`."""


@dataclass(frozen=True)
class Plan:
    """The cost of training all runs of a study; measuring them is not counted."""

    study: Study
    scale: ScaleName
    seeds: int
    arms: tuple[ArmCost, ...]
    runs: int
    """The number of runs for all seeds; arms with the same recipe share theirs."""
    flops: float
    gpu_hours: float
    """The sum over all runs, estimated by `ASSUMPTION`."""
    power: Mapping[str, float | None]
    """What an expectation says -> how often so many seeds find the paper's effect; None if the paper has no number."""
    minutes: float | None
    """On two cores, only at CPU scale: the study's own estimate if it is conducted as written, else by `TWO_CORES`."""

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        facts = {key: value for key, value in asdict(self).items() if key != "study"}
        return {"claim": self.study.claim, **facts, "assumption": ASSUMPTION}


def plan_study(
    what: str | Path | Study,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    scale: ScaleName = "cpu",
    seeds: int | None = None,
) -> Plan:
    """Build every network of a study and count what training it would cost; takes the same arguments as `study`."""
    chosen = what if isinstance(what, Study) else open_study(what)
    number = chosen.seeds_at(scale, seeds)
    recipes = chosen.recipes(overrides, scale, data)
    arms = {arm: _count_cost(arm, recipe, chosen.changes_at(scale)) for arm, recipe in recipes.items()}
    begun = {arm: chosen.starts.get(arm) for arm in recipes}
    distinct = {(recipe.model_dump_json(), begun[arm]): arms[arm] for arm, recipe in recipes.items()}.values()
    flops = number * math.fsum(cost.flops for cost in distinct)
    minutes = flops / TWO_CORES / 60
    if chosen.minutes is not None and not overrides:
        minutes = chosen.minutes * number / chosen.seeds
    return Plan(
        study=chosen,
        scale=scale,
        seeds=number,
        arms=tuple(arms.values()),
        runs=number * len(distinct),
        flops=flops,
        gpu_hours=number * math.fsum(cost.gpu_hours for cost in distinct),
        power={one.says: estimate_power(one, chosen, number) for one in chosen.expectations},
        minutes=minutes if scale == "cpu" else None,
    )


def _count_cost(arm: str, recipe: Recipe, scale: Scale) -> ArmCost:
    if recipe.max_time is not None:
        raise RecipeError(
            f"The cost of '{arm}' is not known beforehand: it trains for a given time (max_time). Give steps or epochs."
        )
    images, spec = _find_facts(recipe, scale)
    try:
        parameters, forward = _build(json.dumps(recipe.model_dump(include={"model", "treatments"})), spec)
    except ModelError as error:
        raise ModelError(f"The network of '{arm}' cannot be built: {error}") from error
    steps = recipe.steps or max(1, math.ceil((recipe.epochs or DEFAULT_EPOCHS) * images / recipe.batch_size - 1e-9))
    seen = steps * recipe.batch_size
    passes = max([treatment.passes() for treatment in recipe.treatments], default=1.0) * recipe.task.passes(spec)
    area = recipe.progressive_resizing.mean_area(images / recipe.batch_size, steps)
    flops = 3.0 * passes * forward * seen * area
    hours = flops / (GPU_PEAK[recipe.precision] * GPU_SHARE) / 3600
    return ArmCost(arm, recipe.model.name, spec.num_classes, spec.img_size, parameters, steps, seen, flops, hours)


def _find_facts(recipe: Recipe, scale: Scale) -> tuple[int, ImageSpec]:
    """Return the number of training images and their kind, from the scale, the recipe or the data, in this order."""
    known: Sequence[int | None] = (scale.images, scale.classes, scale.size)
    images, spec = (0, ImageSpec(0, 3, (0, 0))) if None not in known else data_facts(recipe.data)
    images, size = scale.images or images, recipe.image_size or scale.size
    if recipe.data.fraction is not None:
        images = max(1, round(recipe.data.fraction * images))
    sides = spec.img_size if size is None else (size, size) if isinstance(size, int) else size
    return min(images, recipe.data.limit or images), ImageSpec(
        scale.classes or spec.num_classes, recipe.model.in_chans or spec.in_chans, sides
    )


@cache
def _build(recipe: str, spec: ImageSpec) -> tuple[int, int]:
    """Return parameters and FLOPs of the network of a recipe's `model` and `treatments`, which arms often share."""
    network = create_network(build_recipe(json.loads(recipe)), spec)
    return sum(parameter.numel() for parameter in network.parameters()), forward_flops(network, spec)


def forward_flops(network: torch.nn.Module, spec: ImageSpec) -> int:
    """Return the FLOPs of a forward pass of one image, counted on the meta device, which computes nothing."""
    network = network.to("meta").eval()
    image = torch.zeros(1, spec.in_chans, *spec.img_size, device="meta")
    return count_flops(lambda: network(image), network)
