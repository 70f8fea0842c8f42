"""Position embeddings in a recorded pass: sums of a state and of numbers that differ by cell and see no image."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vitclinic.anatomy.observation.locate import Locator
from vitclinic.anatomy.observation.naming import Draft
from vitclinic.anatomy.observation.residuals import origin
from vitclinic.anatomy.observation.stretch import Stretch, weights_behind
from vitclinic.anatomy.observation.trace import Trace, Value, has_cells
from vitclinic.anatomy.removal import Erase
from vitclinic.anatomy.units import Unit

_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))


def end_before_position(stretch: Stretch, locator: Locator) -> int | None:
    """Return the last value on the last grid of a stretch that comes before tokens or positions are added."""
    grid = grid_of(stretch.record.values[stretch.last])
    end = None
    for value in stretch.values:
        if grid_of(value) != grid or not has_cells(value):
            continue
        if end is not None and (value.op == "cat" or _is_position(stretch.record, value)):
            break
        if locator.is_readable(value.index):
            end = value.index
    return end


def _is_position(record: Trace, value: Value) -> bool:
    """Return True for a sum of a state and of numbers that differ by cell and do not depend on the image."""
    fixed = [record.values[parent] for parent in value.parents if record.values[parent].places is None]
    if value.op != "add" or len(fixed) != 1 or value.places is None or not has_cells(value):
        return False
    if record.values[origin(record, fixed[0].index)].op in _ZEROS:  # a state to begin with
        return False
    height, width = value.places.grid
    cells = torch.where(value.places.cells >= 0, value.places.cells % (height * width), value.places.cells)
    offset = cells.ndim - len(fixed[0].shape)
    varying = [axis for axis in range(offset, cells.ndim) if fixed[0].shape[axis - offset] > 1]
    return any(bool((cells.narrow(axis, 0, 1) != cells).any()) for axis in varying)


def draft_position(stretch: Stretch, locator: Locator) -> Iterator[Draft]:
    """Yield the unit that adds a position embedding in a stretch, if there is one."""
    found = [value for value in stretch.values if _is_position(stretch.record, value)]
    if not found:
        return
    end = found[-1].index
    for value in stretch.values:
        if value.op == "cat" and end in value.parents and has_cells(value):
            end = value.index
    before, after = locator.read(stretch.first), locator.read(end)
    if before is None or after is None:
        return
    added = [parent for value in found for parent in value.parents if stretch.record.values[parent].places is None]
    weights = list(dict.fromkeys(weight for parent in added for weight in weights_behind(stretch.record, parent)))
    removal = Erase(weights[0]) if len(weights) == 1 else None
    call = stretch.record.values[end].call
    unit = Unit("position", "position", 0, call.module, before, after, removal=removal, parameters=tuple(weights))
    yield Draft(end, call, unit, fixed="position")


def grid_of(value: Value) -> tuple[int, int] | None:
    """Return the size of the grid that a value lies on."""
    return None if value.places is None else value.places.grid
