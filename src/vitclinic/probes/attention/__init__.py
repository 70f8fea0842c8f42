"""Code shared by the attention probes: units with attention maps, maps in pieces, and means over images and layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Anatomy, Unit

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


class LayerSums(Protocol):
    """A layer with sums over images."""

    def sums(self) -> dict[str, RunningMean]: ...


def sums_by_layer(layers: Mapping[str, LayerSums]) -> dict[str, RunningMean]:
    """Return the sums of all layers, by the names of layer and sum."""
    return {f"{layer} {name}": mean for layer, sums in layers.items() for name, mean in sums.sums().items()}


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
