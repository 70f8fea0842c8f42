"""Ways of removing a unit from a network, each undone when its context ends, even after an exception."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy.forward import Removable, eager
from vitclinic.anatomy.sites import Site, watch


@dataclass(frozen=True, eq=False)
class Silence:
    """Removal that sets a branch to zero after its last norm and scale: what it is added to, or lies beside, stays.

    Example:
        >>> from vitclinic.anatomy import out_of
        >>> layer = nn.Linear(2, 2)
        >>> with Silence(out_of(layer)).apply():
        ...     layer(torch.ones(1, 2)).sum().item()
        0.0
    """

    branch: Site

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "branch set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set the branch to zero until the context ends."""
        with _keep_hooks(watch(self.branch, torch.zeros_like)):
            yield


@dataclass(frozen=True, eq=False)
class Bypass:
    """Removal that replaces a conv by the identity or, with a stride s, by taking every s-th pixel [park2022]."""

    conv: nn.Conv2d

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "conv replaced by " + ("the identity" if self.conv.stride == (1, 1) else "subsampling")

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Replace the conv until the context ends."""
        rows, columns = self.conv.stride

        def subsample(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
            x_bchw: Tensor = args[0]
            # A copy: the layers that follow may work in place, and the input is not theirs.
            return x_bchw[..., ::rows, ::columns].clone()

        with _keep_hooks([self.conv.register_forward_hook(subsample)]):
            yield


@dataclass(frozen=True, eq=False)
class Erase:
    """Removal that sets a parameter added to the state, such as a position embedding, to zero."""

    parameter: nn.Parameter

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "parameter set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        # Swapping the storage, not writing into it: the values come back bit for bit, and no graph built
        # earlier is told that its tensor has changed.
        """Set the parameter to zero until the context ends."""
        values = self.parameter.data
        self.parameter.data = torch.zeros_like(values)
        try:
            with eager():
                yield
        finally:
            self.parameter.data = values


@contextmanager
def _keep_hooks(handles: Sequence[Removable]) -> Iterator[None]:
    """Run the network eagerly, so that its hooks are called, and remove these when the context ends."""
    try:
        with eager():
            yield
    finally:
        for handle in handles:
            handle.remove()
