"""Displacement of weights in place, from which they are restored bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn


class Displacement:
    """Context in which parameters can be set to w + e repeatedly, where w are their original values.

    It keeps one copy of w, and restores it on leaving, also on errors. Writes bypass autograd, so a graph made before
    can still be differentiated once w is restored.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with Displacement(list(layer.parameters())) as displacement:
        ...     displacement.along([[torch.ones(1, 2), torch.zeros(1)]], [0.5])
        ...     loss = layer(torch.ones(1, 2))
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._live = [p.data for p in parameters]
        self._home: list[Tensor] = []

    def __enter__(self) -> Displacement:
        self._home = [weight.clone() for weight in self._live]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._go_home()
        self._home = []

    def along(self, directions: Sequence[Sequence[Tensor]], coordinates: Sequence[float]) -> None:
        """Set the parameters to w + sum_k coordinate_k direction_k; a direction has one tensor per parameter."""
        self._go_home()
        for direction, coordinate in zip(directions, coordinates, strict=True):
            torch._foreach_add_(self._live, list(direction), alpha=coordinate)

    def by_noise(self, sigma: float, seed: int) -> None:
        """Set the parameters to w + e, e ~ N(0, sigma^2); the same seed gives the same e on one type of device."""
        generators: dict[torch.device, torch.Generator] = {}
        for weight in self._live:  # the noise is drawn in place: no memory beyond the copy of w
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
            weight.normal_(0.0, sigma, generator=generators[weight.device])
        torch._foreach_add_(self._live, self._home)

    def _go_home(self) -> None:
        torch._foreach_copy_(self._live, self._home)
