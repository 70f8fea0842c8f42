"""Assigning parameters to units."""

from __future__ import annotations

from torch import nn

from vitclinic.anatomy import Anatomy, Erase, Unit


def parameters_by_unit(anatomy: Anatomy) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by the unit's name; no parameter belongs to two units.

    A unit owns the parameters of its module and its norm; the position embedding is a unit of its own. Some parameters
    belong to no unit, such as a class token or a norm after the stem.

    Example:
        >>> import timm, torch
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224", img_size=32), torch.rand(1, 3, 32, 32))
        >>> len(parameters_by_unit(anatomy)["blocks.0.mlp"])  # two linear layers and a norm
        6
    """
    taken: set[int] = set()
    result: dict[str, list[nn.Parameter]] = {}
    for unit in anatomy.units:
        result[unit.name] = [p for p in _candidates(unit) if id(p) not in taken]
        taken |= {id(p) for p in result[unit.name]}
    return result


def _candidates(unit: Unit) -> dict[nn.Parameter, None]:
    """Return the parameters of a unit in order, each once, since a module may contain its norm."""
    modules = [unit.module] if unit.norm is None else [unit.module, unit.norm]
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    if isinstance(unit.removal, Erase):
        found[unit.removal.parameter] = None
    return found
