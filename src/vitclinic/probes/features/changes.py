"""A number of each feature map, in every unit of a network, and how the units of each kind change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import UnitRow
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Anatomy, Kind, Site, Unit
from vitclinic.anatomy.sites import version_of
from vitclinic.data import Batch
from vitclinic.probes.features.states import spatial_states
from vitclinic.probes.probe import DoesNotApply, Result, Tally, check_finite, mean_scalar, unit_row

_COMPARED: tuple[Kind, ...] = ("msa", "mlp", "token_mlp", "conv")
"""Kinds of units whose mean change is a scalar of the result [park2022 Fig. 8, 9]."""


class ChangesTally(Tally):
    """Running means over images of the numbers of each state, and of their change across each unit.

    A subclass implements `numbers`. The change is the last number of a unit's output minus that of its input for the
    same image, so that its interval is one of paired differences. A stem has no change, since its input is an image.
    Grids of a single position are skipped.
    """

    number: str
    """Name of the last number of a state."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.units = [state.unit for state in spatial_states(anatomy)]
        self.sizes: dict[Site, tuple[int, int]] = {}
        self.states: dict[str, RunningMean] = defaultdict(RunningMean)
        self.changes: dict[str, RunningMean] = defaultdict(RunningMean)
        self.kinds: dict[Kind, RunningMean] = defaultdict(RunningMean)
        self._batch: dict[Site, Tensor] = {}
        self._last: tuple[Site, Tensor, int | None] | None = None

    def numbers(self, maps: Tensor) -> Tensor:
        """Return the numbers [B, K] of feature maps [B, C, H, W] of more than one position, in float32 or float64."""
        raise TypeError(f"{type(self).__name__} must implement numbers().")

    def taps(self) -> Mapping[Site, Site]:
        inputs = [unit.input for unit in self.units if unit.kind != "stem" and unit.input.layout.spatial]
        return {site: site for site in (*inputs, *(unit.output for unit in self.units))}

    def update(self, key: Site, activation: Tensor) -> None:
        maps = self.anatomy.grid(key, activation)
        height, width = maps.shape[2:]
        self.sizes[key] = (height, width)
        if height * width == 1:
            return
        if self._last is not None and _is_same(maps, self._last[1], self._last[2]):
            self._batch[key] = self._batch[self._last[0]]
            return
        self._batch[key] = self.numbers(maps if maps.dtype in (torch.float32, torch.float64) else maps.float())
        # Kept until the next state, since another tensor at the same address would look the same.
        self._last = (key, maps, version_of(maps))

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        seen, self._batch, self._last = _to_host(self._batch), {}, None
        changes: dict[Kind, list[NDArray[np.float64]]] = defaultdict(list)
        for unit in self.units:
            if unit.output not in seen:
                continue
            check_finite(seen[unit.output], unit)
            self.states[unit.name].add(seen[unit.output])
            if unit.input in seen:
                change = seen[unit.output][:, -1] - seen[unit.input][:, -1]
                self.changes[unit.name].add(change)
                if self.sizes[unit.input] == self.sizes[unit.output]:
                    changes[unit.kind].append(change)
        for kind in _COMPARED:
            if changes[kind]:
                self.kinds[kind].add(np.mean(changes[kind], axis=0))

    def sums(self) -> dict[str, RunningMean]:
        groups = (("state", self.states), ("change", self.changes), ("kind", self.kinds))
        return {f"{group} {name}": mean for group, means in groups for name, mean in means.items()}

    def find_units(self) -> list[Unit]:
        """Return the units with at least one measured number, in order."""
        units = [unit for unit in self.units if unit.name in self.states]
        if not units:
            raise DoesNotApply(
                "every feature map of the network has a single position, so nothing varies over its grid."
            )
        return units

    def finish(self) -> Result:
        units = self.find_units()
        scalars = {f"{self.number}_last": mean_scalar(self.states[units[-1].name])}
        scalars |= {f"{self.number}_change_{kind}": mean_scalar(mean) for kind, mean in self.kinds.items()}
        return Result(scalars, [self._row(unit) for unit in units])

    def _row(self, unit: Unit) -> UnitRow:
        values = {self.number: mean_scalar(self.states[unit.name])}
        if unit.name in self.changes:
            values["change"] = mean_scalar(self.changes[unit.name])
        return unit_row(unit, **values)


def _is_same(maps: Tensor, last: Tensor, version: int | None) -> bool:
    """Return True if `maps` is the unchanged tensor `last`: the input of most units is the output of the one before."""
    return (
        version is not None
        and version_of(maps) == version
        and (maps.data_ptr(), maps.shape, maps.stride()) == (last.data_ptr(), last.shape, last.stride())
    )


def _to_host(numbers: Mapping[Site, Tensor]) -> dict[Site, NDArray[np.float64]]:
    """Move all numbers of a batch to the CPU at once, so that a GPU is synchronized only once."""
    if not numbers:
        return {}
    together = torch.cat(list(numbers.values()), dim=1).cpu().double().numpy()
    ends = np.cumsum([each.shape[1] for each in numbers.values()])
    return dict(zip(numbers, np.split(together, ends[:-1], axis=1), strict=True))
