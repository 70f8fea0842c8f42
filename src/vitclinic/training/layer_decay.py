"""Learning rates that differ between parts of a network, and parts that are not trained.

With `layer_decay` d, a parameter of the l-th of L levels has the rate d ** (L - 1 - l) times that of the head, which is
the last level [Clark et al. 2020; Bao et al. 2022]. A level is a block of the anatomy, or a unit that is part of no
block; what is before the first block is one level, so that values from the literature mean the same here.
"""

from __future__ import annotations

import torch
from torch import nn

from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.table import parameters_by_unit
from vitclinic.data import ImageSpec
from vitclinic.models import Normalized
from vitclinic.models.filling import find_classifier
from vitclinic.training.recipe import Recipe

BACKBONE = "backbone"
"""All of a network but its classifier, as an entry of `freeze`."""


def freeze_units(recipe: Recipe, network: Normalized, spec: ImageSpec) -> None:
    """Take the units and blocks of `freeze` out of training; their batch norms keep their statistics.

    Call it when the network is in training mode.

    Raises:
        RecipeError: There is no such unit or block, or nothing would be left to train.
    """
    if not recipe.freeze:
        return
    frozen: set[int] = set()
    names = [name for name in recipe.freeze if name != BACKBONE]
    if BACKBONE in recipe.freeze:
        head = _head_parameters(network)
        frozen |= {id(parameter) for parameter in network.backbone.parameters()} - head
    if names:
        anatomy = examine(network, spec)
        owned = parameters_by_unit(anatomy)
        known = [*owned, *(block.name for block in anatomy.blocks)]
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or " `vitclinic anatomy` lists them."
                raise RecipeError(f"'freeze': the network has no unit or block '{name}'.{hint}")
            frozen |= {id(p) for unit in anatomy.units if name in (unit.name, unit.block) for p in owned[unit.name]}
            frozen |= {id(p) for key, p in anatomy.network.named_parameters() if key.startswith(f"{name}.")}
    for parameter in network.backbone.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise RecipeError("'freeze' leaves nothing to train; name fewer units.")
    for module in network.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and own and not any(p.requires_grad for p in own):
            module.eval()


def rate_scales(recipe: Recipe, network: Normalized, spec: ImageSpec) -> dict[int, float]:
    """Return the factor on the learning rate of parameters, by their id; empty if all have the same rate."""
    scales: dict[int, float] = {}
    if recipe.layer_decay != 1.0:
        levels = parameter_levels(examine(network, spec))
        last = max(levels.values())
        scales = {key: recipe.layer_decay ** (last - level) for key, level in levels.items()}
    if recipe.head_lr is not None:
        scales |= dict.fromkeys(_head_parameters(network), recipe.head_lr / recipe.optimizer.lr)
    return scales


def parameter_levels(anatomy: Anatomy) -> dict[int, int]:
    """Return the level of each parameter, by its id: 0 before the first block, the highest for the head.

    A parameter of no unit belongs to the block whose name its own begins with, such as a layer scale, or else to the
    level of the parameter before it, such as a class token or a norm between stages.

    Example:
        >>> import timm
        >>> network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
        >>> levels = parameter_levels(Anatomy.of(network))
        >>> [levels[id(p)] for p in (network.cls_token, network.blocks[1].attn.qkv.weight, network.head.weight)]
        [0, 2, 3]
    """
    level, block = 0, None
    of_unit: dict[str, int] = {}
    of_block: dict[str, int] = {}
    for unit in anatomy.units:
        starts_level = unit.block != block if unit.block is not None else unit.kind == "head"
        if starts_level:
            level, block = level + 1, unit.block
        of_unit[unit.name] = level
        if unit.block is not None:
            of_block[unit.block] = level
    levels = {id(p): of_unit[name] for name, owned in parameters_by_unit(anatomy).items() for p in owned}
    previous = 0
    for name, parameter in anatomy.network.named_parameters():
        inside = (found for block, found in of_block.items() if name.startswith(f"{block}."))
        previous = levels.setdefault(id(parameter), next(inside, previous))
    return levels


def examine(network: nn.Module, spec: ImageSpec) -> Anatomy:
    """Return the anatomy, by noise, which shows every residual."""
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(1, spec.in_chans, *spec.img_size, generator=generator)
    return Anatomy.of(network, example.to(next(network.parameters())))


def _head_parameters(network: Normalized) -> set[int]:
    if network.trunk is not network.backbone:  # a task's head is all that is beside the trunk
        trunk = {id(parameter) for parameter in network.trunk.parameters()}
        return {id(parameter) for parameter in network.backbone.parameters()} - trunk
    prefixes = find_classifier(network.backbone)
    return {id(parameter) for name, parameter in network.backbone.named_parameters() if name.startswith(prefixes)}
