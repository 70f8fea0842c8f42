"""Which parameters belong to which unit."""

from __future__ import annotations

from torch import nn

from vitclinic.anatomy import Anatomy, Erase, Unit


def parameters_by_unit(anatomy: Anatomy) -> dict[str, list[nn.Parameter]]:
    """The parameters of each unit, by the units' names; no parameter is in two of them.

    A unit has those of its module and its norm, and a position embedding is its unit's. Parameters of no unit (a class
    token, a norm behind a stem) are in none.
    """
    taken: set[int] = set()
    result: dict[str, list[nn.Parameter]] = {}
    for unit in anatomy.units:
        result[unit.name] = [p for p in _candidates(unit) if id(p) not in taken]
        taken |= {id(p) for p in result[unit.name]}
    return result


def _candidates(unit: Unit) -> dict[nn.Parameter, None]:
    """In order, each once: a module may hold its norm."""
    modules = [unit.module] if unit.norm is None else [unit.module, unit.norm]
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    if isinstance(unit.removal, Erase):
        found[unit.removal.parameter] = None
    return found
