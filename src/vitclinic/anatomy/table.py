"""An anatomy as a table: what a reader wants to know of each unit, its parameters, and the text of `print(anatomy)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from vitclinic.anatomy.removal import Erase
from vitclinic.anatomy.units import AttentionSpec, Kind, Unit

if TYPE_CHECKING:
    from vitclinic.anatomy.anatomy import Anatomy
    from vitclinic.anatomy.sites import Size

_HEADS = ("num_heads", "num_attention_heads", "learned_heads", "heads")
"""Attributes in which attention modules of the libraries and of ours keep the number of their heads."""


@dataclass(frozen=True)
class UnitFacts:
    """Facts about one unit, as plain values.

    Args:
        depth: The unit's place in the network, from 0.
        name: Its name.
        kind: Its kind.
        stage: Its stage, from 0.
        block: The block that it is part of.
        grid: Rows and columns of the features after it; None if they are on no grid.
        prefix: Number of tokens off the grid.
        channels: Channels of the features after it, where known.
        parameters: Number of its parameters that no earlier unit uses.
        shared: True if it uses parameters, all of which an earlier unit uses as well.
        residual: True if it adds to the state.
        attention: True if its attention map can be recorded.
        heads: Number of heads of that map, where known.
        windows: Size of its windows, such as `7 x 7`, or how many there are; None if attention is global.
        removal: How it can be removed; None if it cannot.
    """

    depth: int
    name: str
    kind: Kind
    stage: int
    block: str | None
    grid: Size | None
    prefix: int
    channels: int | None
    parameters: int
    shared: bool
    residual: bool
    attention: bool
    heads: int | None
    windows: str | None
    removal: str | None


def list_facts(anatomy: Anatomy) -> list[UnitFacts]:
    """Return the facts about each unit, in order.

    Example:
        >>> import timm
        >>> from vitclinic.anatomy import Anatomy
        >>> first = list_facts(Anatomy.of(timm.create_model("vit_tiny_patch16_224", depth=1)))[2]
        >>> first.name, first.grid, first.prefix, first.channels, first.parameters, first.heads
        ('blocks.0.msa', (14, 14), 1, 192, 148608, 3)
    """
    owned = assign_parameters(anatomy.units)
    return [_facts(anatomy, unit, owned[unit.name]) for unit in anatomy.units]


def count_outside(anatomy: Anatomy) -> int:
    """Return the number of parameters that belong to no unit, such as those of a class token."""
    inside = {id(parameter) for found in assign_parameters(anatomy.units).values() for parameter in found}
    return _count(parameter for parameter in anatomy.network.parameters() if id(parameter) not in inside)


def _facts(anatomy: Anatomy, unit: Unit, owned: Sequence[nn.Parameter]) -> UnitFacts:
    grid = anatomy.output_grid(unit)
    spec = unit.attention
    return UnitFacts(
        depth=unit.depth,
        name=unit.name,
        kind=unit.kind,
        stage=unit.stage,
        block=unit.block,
        grid=grid,
        prefix=0 if grid is None else unit.output.layout.prefix,
        channels=anatomy.output_channels(unit),
        parameters=_count(owned),
        shared=not owned and bool(parameters_used(unit)),
        residual=unit.residual is not None,
        attention=spec is not None,
        heads=None if spec is None else _count_heads(spec),
        windows=None if spec is None else _describe_windows(anatomy, spec),
        removal=None if unit.removal is None else unit.removal.how,
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _count_heads(spec: AttentionSpec) -> int | None:
    """Return the number of heads: as the recorded pass showed it, else as the module says; uniform heads included."""
    if spec.seen is not None:
        lengths = (length for split in spec.seen.splits for length in split if length > 0)
        heads: int | None = len(spec.seen.numbers) * math.prod(lengths) // spec.seen.windows
    else:
        stated = (getattr(spec.module, name, None) for name in _HEADS)
        heads = next((count for count in stated if isinstance(count, int)), None)
    return None if heads is None else heads + int(getattr(spec.module, "uniform_heads", 0))


def _describe_windows(anatomy: Anatomy, spec: AttentionSpec) -> str | None:
    if spec.seen is not None:
        return f"{spec.seen.windows} windows" if spec.seen.windows > 1 else None
    if spec.windows is None:
        return None
    height, width = spec.windows(anatomy.size(spec.keys)).size
    return f"{height} x {width} windows"


def describe(anatomy: Anatomy) -> str:
    """Return what an anatomy is of in one line: class, images, how it was found, units and parameters."""
    image = "" if anatomy.image is None else f" on {' x '.join(map(str, anatomy.image))} images"
    found = "observed from one forward pass" if anatomy.observed else f"family {anatomy.family}"
    total = _count(anatomy.network.parameters())
    return f"{type(anatomy.network).__name__}{image}: {len(anatomy.units)} units, {total:,} parameters ({found})"


def list_cells(facts: Sequence[UnitFacts]) -> dict[str, list[str]]:
    """Return the table's columns as text, without those that are empty for all units."""
    columns: dict[str, list[str]] = {
        "": [str(unit.depth) for unit in facts],
        "unit": [unit.name for unit in facts],
        "kind": [unit.kind for unit in facts],
        "stage": [str(unit.stage) for unit in facts],
        "grid": ["" if unit.grid is None else f"{unit.grid[0]} x {unit.grid[1]}" for unit in facts],
        "prefix": [str(unit.prefix or "") for unit in facts],
        "channels": ["" if unit.channels is None else f"{unit.channels:,}" for unit in facts],
        "parameters": ["shared" if unit.shared else f"{unit.parameters:,}" for unit in facts],
        "residual": ["yes" if unit.residual else "" for unit in facts],
        "attention map": [_attention(unit) for unit in facts],
        "removed by": [unit.removal or "" for unit in facts],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _attention(unit: UnitFacts) -> str:
    if not unit.attention:
        return ""
    heads = None if unit.heads is None else f"{unit.heads} head{'s' * (unit.heads != 1)}"
    return ", ".join(part for part in (heads, unit.windows) if part) or "yes"


NUMBERS = frozenset({"", "stage", "grid", "prefix", "channels", "parameters"})
"""Columns that are aligned to the right."""


def list_remarks(anatomy: Anatomy) -> Iterator[str]:
    """Yield the sentences below the table: parameters outside the units, and what could not be settled."""
    outside = count_outside(anatomy)
    if outside:
        yield f"{outside:,} parameters belong to no unit."
    for note in anatomy.notes:
        yield f"{note[:1].upper()}{note[1:]}"


def format_anatomy(anatomy: Anatomy) -> str:
    """Return an anatomy as lines of text: what it is of, a row for each unit, and what could not be settled."""
    lines = [describe(anatomy)]
    columns = list_cells(list_facts(anatomy))
    aligned = []
    for title, cells in columns.items():
        width = max(len(cell) for cell in (title, *cells))
        aligned.append([f"{cell:>{width}}" if title in NUMBERS else f"{cell:<{width}}" for cell in (title, *cells)])
    lines += ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
    return "\n".join([*lines, *list_remarks(anatomy)])


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


def parameters_by_unit(anatomy: Anatomy) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by the unit's name; no parameter belongs to two units.

    A unit owns the parameters that it uses and that no unit before it does: of a family's unit, those of its module and
    its norm; the position embedding is a unit of its own. Some parameters belong to no unit, such as a class token or a
    norm after the stem.

    Args:
        anatomy: Of the network.

    Example:
        >>> import timm, torch
        >>> from vitclinic.anatomy import Anatomy
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224", img_size=32), torch.rand(1, 3, 32, 32))
        >>> len(parameters_by_unit(anatomy)["blocks.0.mlp"])  # two linear layers and a norm
        6
    """
    return assign_parameters(anatomy.units)
