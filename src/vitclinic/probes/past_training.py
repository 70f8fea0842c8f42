"""The training of a subject's network, as far as probes need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data import Augment


@dataclass(frozen=True)
class PastWeights:
    """Weights of a training run over its epochs, in order; the last ones are its final weights.

    Everything is read lazily.
    """

    weights: Mapping[float, Callable[[], Mapping[str, Tensor]]]
    """For each epoch, a function that reads the state dict."""
    projections: Callable[[], Mapping[float, NDArray[np.float64]]]
    """Reads the random projection [k] of all parameters at each epoch; the projection is the same for all epochs."""
    digest: Callable[[], str]
    """Returns a digest of all of these weights."""
    finished: bool
    """True if the training ran to its end."""


@dataclass(frozen=True)
class Training:
    """Training setup of a network, as far as a probe of its training loss has to repeat it."""

    augment: Augment
    """Augmentation, mixup and CutMix included."""
    decay: float
    """Weight decay."""
    decayed: frozenset[str]
    """Names of the parameters that were decayed."""
    past: PastWeights | None = None
    """Weights over the epochs, if they were kept."""
