"""What a study would cost: every network is built, and its FLOPs counted, without data and without training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitclinic.studies.study import Study
from vitclinic.training import Recipe
from vitclinic.training.network import network_for
from vitclinic.training.recipe import DEFAULT_EPOCHS
from vitclinic.treatments import Case

GPU_FLOPS = 1.2e14
"""What the estimate takes a GPU to do in a second: an A100 in bf16 at 40% of its peak. Not measured here."""


@dataclass(frozen=True)
class ArmCost:
    """One arm, for one seed."""

    arm: str
    parameters: int
    steps: int
    images: int
    """Seen in training, all epochs together."""
    flops: float
    """Of the training: three forward passes an image, six where a step rule takes two gradients."""


def arm_costs(study: Study, words: tuple[str, ...], paper: bool, images: int, classes: int, size: int) -> list[ArmCost]:
    """What each arm costs on `images` training images of `classes` classes and `size` pixels a side."""
    return [
        _cost(arm, recipe, images, Case(classes, 3, (size, size)))
        for arm, recipe in study.recipes(words, paper).items()
    ]


def _cost(arm: str, recipe: Recipe, images: int, case: Case) -> ArmCost:
    asked = recipe.image_size
    if asked is not None:
        case = Case(case.classes, case.channels, (asked, asked) if isinstance(asked, int) else asked)
    network = network_for(recipe, case).eval()
    forward = _forward_flops(network, case)
    used = min(images, recipe.data.limit or images)
    used = math.ceil(used * (recipe.data.fraction or 1.0))
    steps = recipe.steps or math.ceil((recipe.epochs or DEFAULT_EPOCHS) * used / recipe.batch_size)
    seen = steps * recipe.batch_size
    gradients = 1 + any(treatment.step_rule() is not None for treatment in recipe.parsed_treatments())
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return ArmCost(arm, parameters, steps, seen, 3.0 * gradients * forward * seen)


def _forward_flops(network: torch.nn.Module, case: Case) -> int:
    image = torch.zeros(1, case.channels, *case.size)
    # fused attention is not counted by torch's counter on every device
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(image)
    return int(counter.get_total_flops())
