"""Tallies of attention maps: sums over the images of each layer, and means over layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import Scalar, UnitRow
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Anatomy, AttentionMap, Unit
from vitclinic.data import Batch
from vitclinic.probes.probe import Result, Tally, mean_scalar

_CACHED = 2**17
_ON_DEVICE = 2**26
"""Numbers processed at a time: what fits the cache of a CPU, or a small part of a GPU's memory."""


def attention_units(anatomy: Anatomy) -> list[Unit]:
    """Return the units with an attention map, in order."""
    return [unit for unit in anatomy.units if unit.attention is not None]


def pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield `x` in pieces along its first axis, each small enough that temporaries stay in the cache."""
    numbers = _CACHED if x.device.type == "cpu" else _ON_DEVICE
    yield from torch.split(x, max(1, numbers // max(1, x[0].numel())))


def divide_scalar(scalar: Scalar, by: float) -> Scalar:
    """Return a scalar and its interval, divided by a positive number."""
    low, high = (None if end is None else end / by for end in (scalar.low, scalar.high))
    return Scalar(value=scalar.value / by, low=low, high=high, n=scalar.n)


def by_layer(means: Sequence[RunningMean]) -> NDArray[np.float64]:
    """Return means per head as [layers, heads], padded with NaN if layers differ in their number of heads."""
    heads = max(mean.mean.size for mean in means)
    return np.stack([np.pad(mean.mean, (0, heads - mean.mean.size), constant_values=np.nan) for mean in means])


class MeanOverLayers:
    """Mean over images of a per-image mean over layers; the layers of a batch are added one by one."""

    def __init__(self) -> None:
        self.running = RunningMean()
        self._layers: list[NDArray[np.float64]] = []

    def add(self, by_image: NDArray[np.float64]) -> None:
        """Add the values of one layer, one per image of the current batch."""
        self._layers.append(by_image)

    def end_batch(self) -> None:
        """Average over the layers added since the last batch."""
        if self._layers:
            self.running.add(np.mean(self._layers, axis=0))
        self._layers = []


class Layer(Protocol):
    """Sums over the images of one layer, one of them by head."""

    heads: RunningMean

    def sums(self) -> dict[str, RunningMean]:
        """Return the sums by name."""

    def row(self, unit: Unit) -> UnitRow:
        """Return the values of the layer's unit."""


class VisibleQueries:
    """The queries of a layer that count: those with at least one visible key; the others are padding.

    Args:
        seen: The first attention map of the layer.
    """

    def __init__(self, seen: AttentionMap) -> None:
        visible = seen.visible()
        self.keys_wq = visible.sum(-1)
        """Number of visible keys of each query, [W, Q]."""
        self.counted = (self.keys_wq > 0).flatten()
        # None if all keys are visible, which is faster.
        self.visible = None if bool(visible.all()) else visible[:, None]

    @property
    def keys(self) -> Tensor:
        """Number of visible keys of each query that counts, in float64."""
        return self.keys_wq.flatten()[self.counted].double()


L = TypeVar("L", bound=Layer)


class AttentionTally(Tally, Generic[L]):
    """Tally of the attention maps of all layers: sums of each layer, and means over layers.

    Args:
        units: The units with attention.
        start: Function from the first map of a layer to its sums.
        means: Names of the means over layers, which `update_attention` adds to.
    """

    def __init__(self, units: Sequence[Unit], start: Callable[[AttentionMap], L], means: Sequence[str]) -> None:
        self.units = units
        self.layers: dict[str, L] = {}
        self.means = {name: MeanOverLayers() for name in means}
        self._start = start

    def attention(self) -> Sequence[Unit]:
        return self.units

    def layer(self, seen: AttentionMap) -> L:
        """Return the sums of a map's layer."""
        if seen.unit.name not in self.layers:
            self.layers[seen.unit.name] = self._start(seen)
        return self.layers[seen.unit.name]

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        for mean in self.means.values():
            mean.end_batch()

    def sums(self) -> dict[str, RunningMean]:
        of_layers = {unit: layer.sums() for unit, layer in self.layers.items()}
        return {name: mean.running for name, mean in self.means.items()} | {
            f"{unit} {name}": mean for unit, sums in of_layers.items() for name, mean in sums.items()
        }

    def result(self, heads: str) -> Result:
        """Return the means over layers, the rows of the layers, and the array `heads`, their values by head."""
        found = [(unit, self.layers[unit.name]) for unit in self.units if unit.name in self.layers]
        scalars = {name: mean_scalar(mean.running) for name, mean in self.means.items() if mean.running.n}
        rows = [layer.row(unit) for unit, layer in found]
        return Result(scalars, rows, {heads: by_layer([layer.heads for _, layer in found])})
