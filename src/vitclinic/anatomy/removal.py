"""The ways of taking a unit out of a network, each undone when its context ends, also on exceptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitclinic.anatomy.eager import eager
from vitclinic.anatomy.sites import Site, watch


@dataclass(frozen=True, eq=False)
class Silence:
    """A residual branch set to zero behind its last norm and scale, so that the state passes unchanged."""

    branch: Site

    @property
    def how(self) -> str:
        return "branch set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        with _keep_hooks(watch(self.branch, torch.zeros_like)):
            yield


@dataclass(frozen=True, eq=False)
class Bypass:
    """A conv replaced by the identity or, if it has a stride s, by taking every s-th pixel [park2022]."""

    conv: nn.Conv2d

    @property
    def how(self) -> str:
        return "conv replaced by " + ("the identity" if self.conv.stride == (1, 1) else "subsampling")

    @contextmanager
    def apply(self) -> Iterator[None]:
        rows, columns = self.conv.stride

        def subsample(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
            x_bchw: Tensor = args[0]
            # A copy: the layers that follow may work in place, and the input is not theirs.
            return x_bchw[..., ::rows, ::columns].clone()

        with _keep_hooks([self.conv.register_forward_hook(subsample)]):
            yield


@dataclass(frozen=True, eq=False)
class Erase:
    """A parameter that is added to the state, such as a position embedding, set to zero."""

    parameter: nn.Parameter

    @property
    def how(self) -> str:
        return "parameter set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        # Swapping the storage, not writing into it: the values come back bit for bit, and no graph built
        # earlier is told that its tensor has changed.
        values = self.parameter.data
        self.parameter.data = torch.zeros_like(values)
        try:
            with eager():
                yield
        finally:
            self.parameter.data = values


@contextmanager
def _keep_hooks(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Run the network eagerly, so that its hooks are called, and take these away at the end."""
    try:
        with eager():
            yield
    finally:
        for handle in handles:
            handle.remove()
