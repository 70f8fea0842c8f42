"""Weights moved about in place, and brought back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn


class Displacement:
    """Some parameters that can be set to w + e again and again, w being where they were; use it as a context.

    It holds one copy of w. Nothing else of the network is written to, and leaving restores w also on errors. Writes go
    past autograd, for which nothing has changed once w is back: a graph made before can still be differentiated.

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
        """w + sum_k coordinate_k direction_k, a direction being one tensor a parameter."""
        self._go_home()
        for direction, coordinate in zip(directions, coordinates, strict=True):
            torch._foreach_add_(self._live, list(direction), alpha=coordinate)

    def by_noise(self, sigma: float, seed: int) -> None:
        """w + e with e Gaussian of standard deviation sigma: the same e for the same seed on one kind of device."""
        generators: dict[torch.device, torch.Generator] = {}
        for weight in self._live:  # the noise is made where the weights will be: no memory beyond the copy of w
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
            weight.normal_(0.0, sigma, generator=generators[weight.device])
        torch._foreach_add_(self._live, self._home)

    def _go_home(self) -> None:
        torch._foreach_copy_(self._live, self._home)
