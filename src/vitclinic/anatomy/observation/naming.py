"""Names, blocks and stages of observed units, by the modules that they belong to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

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
        units.append(replace(draft.unit, name=name, block=block, stage=stage))
    return units


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
        path = _parent(own) if own else path
    elif draft.own and not path.rpartition(".")[2].isdigit():
        path = _parent(path) or path
    number = f"#{call.number + 1}" if calls[call.module] > 1 else ""
    return f"{path}{number}" or None


def _parent(path: str) -> str:
    """Return the path of the module around; of the layers of a list, that is the entry of the list."""
    parent, _, _ = path.rpartition(".")
    return parent
