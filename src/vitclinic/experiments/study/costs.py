"""What a study would cost: every network is built, and its FLOPs counted, without images and without training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import ImageSpec
from vitclinic.experiments.study.catalogue import data_facts, open_study
from vitclinic.experiments.study.conduct import seed_count, with_data
from vitclinic.experiments.study.study import Scale, ScaleName, Study
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.network import create_network
from vitclinic.training.recipe import DEFAULT_EPOCHS

GPU_PEAK = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12}
"""Floating-point operations in a second that an A100's data sheet promises, by precision."""
GPU_SHARE = 0.4
"""Of which training is taken to reach so much. Large networks do; small ones on small images reach far less."""
TWO_CORES = 45e9
"""Floating-point operations in a second of two processes, one on each core: six runs of small ViTs made 22.4e9 each."""
ASSUMPTION = "one A100 at 40% of its peak in the recipe's precision, not measured by us; small networks reach less"


@dataclass(frozen=True)
class ArmCost:
    """One arm, for one seed."""

    arm: str
    model: str
    classes: int
    size: tuple[int, int]
    parameters: int
    steps: int
    images: int
    """Seen in training, all epochs together."""
    flops: float
    """Of the training, two for each multiplication and addition: three forward passes an image for a plain step."""
    gpu_hours: float
    """By `ASSUMPTION`."""


@dataclass(frozen=True)
class Plan:
    """What conducting a study takes; measuring the runs is not counted."""

    study: Study
    scale: ScaleName
    seeds: int
    arms: tuple[ArmCost, ...]
    runs: int
    """Of all seeds; arms with one recipe share theirs."""
    flops: float
    gpu_hours: float
    """Of all runs, by `ASSUMPTION`."""
    minutes: float | None
    """On two cores, only at the CPU's scale: as the study says if it is conducted as written, else by `TWO_CORES`."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        facts = {key: value for key, value in asdict(self).items() if key != "study"}
        return {"claim": self.study.claim, **facts, "assumption": ASSUMPTION}


def plan_study(
    what: str | Path | Study,
    *words: str,
    data: str | Path | None = None,
    scale: ScaleName = "cpu",
    seeds: int | None = None,
) -> Plan:
    """Build every network of a study and count; of the data, only the kind and number of images need be known."""
    chosen = what if isinstance(what, Study) else open_study(what)
    number = seed_count(chosen, scale, seeds)
    recipes = chosen.recipes(with_data(words, data), scale)
    arms = {arm: _cost(arm, recipe, chosen.at(scale)) for arm, recipe in recipes.items()}
    distinct = {recipe.model_dump_json(): arms[arm] for arm, recipe in recipes.items()}.values()
    flops = number * math.fsum(cost.flops for cost in distinct)
    minutes = flops / TWO_CORES / 60
    if chosen.minutes is not None and not words:
        minutes = chosen.minutes * number / chosen.seeds
    return Plan(
        study=chosen,
        scale=scale,
        seeds=number,
        arms=tuple(arms.values()),
        runs=number * len(distinct),
        flops=flops,
        gpu_hours=number * math.fsum(cost.gpu_hours for cost in distinct),
        minutes=minutes if scale == "cpu" else None,
    )


def _cost(arm: str, recipe: Recipe, scale: Scale) -> ArmCost:
    if recipe.max_time is not None:
        raise RecipeError(f"'{arm}' trains for a time (max_time): its number of steps is not known beforehand.")
    images, spec = _facts(recipe, scale)
    try:
        parameters, forward = _built(json.dumps(recipe.model_dump(include={"model", "treatments"})), spec)
    except ModelError as error:
        raise ModelError(f"The network of '{arm}' cannot be built: {error}") from error
    steps = recipe.steps or max(1, math.ceil((recipe.epochs or DEFAULT_EPOCHS) * images / recipe.batch_size - 1e-9))
    seen = steps * recipe.batch_size
    passes = max([treatment.passes() for treatment in recipe.treatments], default=1.0)
    flops = 3.0 * passes * forward * seen
    hours = flops / (GPU_PEAK[recipe.precision] * GPU_SHARE) / 3600
    return ArmCost(arm, recipe.model.name, spec.num_classes, spec.img_size, parameters, steps, seen, flops, hours)


def _facts(recipe: Recipe, scale: Scale) -> tuple[int, ImageSpec]:
    """Training images, and their kind: as the scale, the recipe or the data say, in this order."""
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
def _built(recipe: str, spec: ImageSpec) -> tuple[int, int]:
    """Parameters and FLOPs of the network that a recipe's `model` and `treatments` make; arms often share one."""
    network = create_network(build_recipe(json.loads(recipe)), spec)
    return sum(parameter.numel() for parameter in network.parameters()), forward_flops(network, spec)


def forward_flops(network: torch.nn.Module, spec: ImageSpec) -> int:
    """Of one image. Counted on torch's meta device, which follows shapes and computes nothing."""
    network = network.to("meta").eval().requires_grad_(False)
    image = torch.zeros(1, spec.in_chans, *spec.img_size, device="meta")
    # torch's counter does not know every fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(image)
    return int(counter.get_total_flops())
