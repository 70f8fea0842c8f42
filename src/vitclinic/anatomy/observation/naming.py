"""Names, blocks and stages of units, which follow from the modules that they belong to and from their grids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from vitclinic.anatomy.observation.trace import Call, Trace
from vitclinic.anatomy.sites import Size
from vitclinic.anatomy.units import Kind, Unit


@dataclass(frozen=True)
class Draft:
    """A unit without name, block and stage.

    Args:
        index: The number of the value that the unit ends with.
        call: The call that it belongs to: of the block that adds, or of its own module.
        unit: The unit.
        fixed: Its name, if it does not follow from modules.
        own: True if the call is that of the unit's own module.
    """

    index: int
    call: Call
    unit: Unit
    fixed: str | None = None
    own: bool = False


def finish(drafts: list[Draft], record: Trace) -> list[Unit]:
    """Return the units with their names, blocks and stages."""
    calls = Counter(call.module for call in {draft.call for draft in drafts})
    paths = {call.module: call.path for call in record.calls}
    kinds = Counter((draft.call, draft.unit.kind) for draft in drafts)
    stages: dict[Size, int] = {}
    used: Counter[str] = Counter()
    units = []
    stage = 0
    for draft in drafts:
        size = record_size(draft)
        if size is not None:
            stage = stages.setdefault(size, len(stages))
        block = None if draft.fixed else _block(draft, kinds, paths, calls)
        name = draft.fixed or (f"{block}.{draft.unit.kind}" if block else draft.unit.kind)
        used[name] += 1
        if not (draft.fixed or block) or used[name] > 1:
            name = f"{name}.{used[name] - 1}"
        around = block if block is None or draft.own else _block_around(block)
        units.append(replace(draft.unit, name=name, block=around, stage=stage))
    return _pair(units)


def _pair(units: list[Unit]) -> list[Unit]:
    """Return the units with one block for a mixing unit and an MLP after it that are blocks of their own.

    So are the attentions and MLPs of two lists, or of one list in turn, and those that are wrapped one by one.
    """
    sizes = Counter(unit.block for unit in units)
    homes = Counter(_parent(block) for block in sizes if block is not None)
    paired = list(units)
    for number, (first, second) in enumerate(pairwise(units)):
        if first.block is None or second.block is None or first.stage != second.stage or second.kind != "mlp":
            continue
        home = _parent(first.block)
        whole = _is_entry(home) and home == _parent(second.block) and homes[home] == 2
        alone = sizes[first.block] == sizes[second.block] == 1
        if alone and (first.kind in ("msa", "token_mlp") or (whole and first.kind == "conv")):
            block = home if whole else f"{first.block}+{second.block}"
            paired[number], paired[number + 1] = replace(first, block=block), replace(second, block=block)
    return paired


def record_size(draft: Draft) -> Size | None:
    """Return the size of the grid that a unit ends on; the stem's and the head's do not count."""
    layout = draft.unit.output.layout
    return layout.size if layout.spatial and draft.unit.kind != "head" else None


def _block(
    draft: Draft, kinds: Counter[tuple[Call, Kind]], paths: dict[nn.Module, str], calls: Counter[nn.Module]
) -> str | None:
    call, path = draft.call, draft.call.path
    if not draft.own and (not path or kinds[call, draft.unit.kind] > 1):
        own = paths.get(draft.unit.module, "") if draft.unit.module is not None else ""
        path = _entry(own) if own else path
    elif draft.own and not _is_entry(path):
        path = _parent(path) or path
    number = f"#{call.number + 1}" if calls[call.module] > 1 else ""
    return f"{path}{number}" or None


def _block_around(path: str) -> str:
    """Return the path of the entry of a list that a module is part of, such as a block; without one, its own path."""
    entry, number = path.partition("#")[0], path.partition("#")[2]
    while entry and not _is_entry(entry):
        entry = _parent(entry)
    return path if not entry or number else entry


def _entry(path: str) -> str:
    """Return the path of the block around a module: the entry of a list that has it, which may be the module itself."""
    return path if _is_entry(path) and not _is_entry(_parent(path)) else _parent(path)


def _is_entry(path: str) -> bool:
    """Return True for the path of an entry of a list."""
    return path.rpartition(".")[2].isdigit()


def _parent(path: str) -> str:
    """Return the path of the module around."""
    return path.rpartition(".")[0]
