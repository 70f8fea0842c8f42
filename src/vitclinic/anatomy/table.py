"""An anatomy as a table: what a reader wants to know of each unit, and the text that `print(anatomy)` shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitclinic.anatomy.units import AttentionSpec, Kind, Unit, assign_parameters, parameters_used

if TYPE_CHECKING:
    from torch import nn

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
