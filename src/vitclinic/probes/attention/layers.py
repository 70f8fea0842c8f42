"""What the attention probes share: the units that have a map, maps in pieces, and means over images."""

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
"""Numbers that are worked on at a time: on a CPU what its cache holds, elsewhere what is a small part of memory."""


def attention_units(anatomy: Anatomy) -> list[Unit]:
    """The units with an attention map, in order."""
    return [unit for unit in anatomy.units if unit.attention is not None]


def pieces(x: Tensor) -> Iterator[Tensor]:
    """`x` along its first axis in pieces small enough that what is made of one stays in the cache."""
    numbers = _CACHED if x.device.type == "cpu" else _ON_DEVICE
    yield from torch.split(x, max(1, numbers // max(1, x[0].numel())))


def divide_scalar(scalar: Scalar, by: float) -> Scalar:
    """The scalar and its interval divided by a positive number."""
    low, high = (None if end is None else end / by for end in (scalar.low, scalar.high))
    return Scalar(value=scalar.value / by, low=low, high=high, n=scalar.n)


def by_layer(means: Sequence[RunningMean]) -> NDArray[np.float64]:
    """Means per head, [layers, heads]; NaN where a layer has fewer heads than another."""
    heads = max(mean.mean.size for mean in means)
    return np.stack([np.pad(mean.mean, (0, heads - mean.mean.size), constant_values=np.nan) for mean in means])


class LayerSums(Protocol):
    """What is summed over images of one layer."""

    def sums(self) -> dict[str, RunningMean]: ...


def sums_by_layer(layers: Mapping[str, LayerSums]) -> dict[str, RunningMean]:
    """All sums of all layers, by the names of both."""
    return {f"{layer} {name}": mean for layer, sums in layers.items() for name, mean in sums.sums().items()}


class MeanOverLayers:
    """The mean over images of what is, for each image, a mean over layers; layers arrive one after another."""

    def __init__(self) -> None:
        self.running = RunningMean()
        self._layers: list[NDArray[np.float64]] = []

    def add(self, by_image: NDArray[np.float64]) -> None:
        """What one layer has for each image of the current batch."""
        self._layers.append(by_image)

    def end_batch(self) -> None:
        """All layers have been added."""
        if self._layers:
            self.running.add(np.mean(self._layers, axis=0))
        self._layers = []
