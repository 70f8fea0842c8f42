"""Which unit a parameter belongs to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from vitclinic.anatomy.removal import Erase
from vitclinic.anatomy.units import Unit


def parameters_used(unit: Unit) -> tuple[nn.Parameter, ...]:
    """Return the parameters that a unit uses, each once: those it states, else those of its module and norm.

    Example:
        >>> from vitclinic.anatomy import into, out_of
        >>> layer = nn.Linear(2, 3)
        >>> [tuple(p.shape) for p in parameters_used(Unit("head", "head", 0, layer, into(layer), out_of(layer)))]
        [(3, 2), (3,)]
    """
    if unit.parameters is not None:
        return unit.parameters
    modules = [module for module in (unit.module, unit.norm) if module is not None]
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    if isinstance(unit.removal, Erase):
        found[unit.removal.parameter] = None
    return tuple(found)


def assign_parameters(units: Iterable[Unit]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by its name; one that several units use belongs to the first of them."""
    taken: set[int] = set()
    owned: dict[str, list[nn.Parameter]] = {}
    for unit in units:
        owned[unit.name] = [parameter for parameter in parameters_used(unit) if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in owned[unit.name]}
    return owned
