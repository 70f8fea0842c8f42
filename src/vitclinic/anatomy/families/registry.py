"""Which families of networks exist, and which one a network belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitclinic.anatomy.units import Unit
from vitclinic.errors import UnknownStructureError
from vitclinic.plugins import load_entry_points

ENTRY_POINTS = "vitclinic.families"
WRAPPERS = ("_orig_mod", "module", "backbone")
"""Where torch.compile, DDP and a network with its own normalisation keep what they wrap."""


@dataclass(frozen=True)
class Family:
    """Networks that are walked the same way.

    `classes` are dotted names of the networks' classes: a network is recognised by them, or by a base class,
    without importing the library it comes from. `units` walks a network and yields its units in the order of
    the forward pass; `input_size` gives the (channels, height, width) of a small input that the network
    accepts.
    """

    name: str
    classes: tuple[str, ...]
    units: Callable[[Any], Iterable[Unit]]
    input_size: Callable[[Any], tuple[int, int, int]]

    def includes(self, network: nn.Module) -> bool:
        """Whether `network` is of one of the family's classes."""
        return any(f"{base.__module__}.{base.__qualname__}" in self.classes for base in type(network).__mro__)


_families: list[Family] = []


def register_family(family: Family) -> Family:
    """Make a family known in this process; it goes before those already known."""
    if not isinstance(family, Family):
        raise TypeError(f"{family!r} is not a Family")
    _families.insert(0, family)
    return family


def known_families() -> tuple[Family, ...]:
    """All families, those registered last first."""
    load_entry_points(ENTRY_POINTS, register_family)
    return tuple(_families)


def recognise(network: nn.Module) -> tuple[nn.Module, Family]:
    """The network inside all wrappers, and its family.

    A module of no known family is looked into through the attributes `WRAPPERS`, in that order, if nothing beside
    that attribute has parameters: a backbone with a head behind it is a network of its own.
    """
    core: nn.Module | None = network
    while core is not None:
        for family in known_families():
            if family.includes(core):
                return core, family
        core = _wrapped(core)
    raise UnknownStructureError(_unknown(network))


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The child that `module` is only a wrapper of."""
    children = dict(module.named_children())
    parameters = set(module.parameters())
    inside = (children[name] for name in WRAPPERS if name in children)
    return next((child for child in inside if parameters == set(child.parameters())), None)


def _unknown(network: nn.Module) -> str:
    """What can be said about a network of no known family, in a sentence."""
    children = ", ".join(f"{name} ({type(child).__name__})" for name, child in network.named_children())
    lists = [
        f"{name} ({len(module)} x {type(next(iter(module))).__name__})"
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len({type(child) for child in module}) == 1
    ]
    return (
        f"no family is known for {type(network).__module__}.{type(network).__qualname__}, whose children "
        f"are {children or 'none'} and whose blocks may be in {', '.join(lists[:8]) or 'none of them'}; "
        "register one as docs/anatomy.md shows "
        f"(known: {', '.join(sorted(family.name for family in known_families()))})."
    )
