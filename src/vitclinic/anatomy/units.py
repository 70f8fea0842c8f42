"""The nouns of an anatomy: units, their residual, what removing them means, their attention.

A family (`vitclinic.anatomy.families`) walks a network and yields its units in the order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import nn

    from vitclinic.anatomy.sites import Layout, Site, Size
    from vitclinic.anatomy.windows import Windows

Kind = Literal["stem", "position", "msa", "mlp", "token_mlp", "conv", "pool", "head"]
"""`pool` is the subsampling between stages; `token_mlp` mixes tokens by fixed weights."""


@dataclass(frozen=True, eq=False)
class Residual:
    """total = skip + branch, checked to 1e-5 when a network is examined."""

    skip: Site
    branch: Site
    total: Site


class Removal(Protocol):
    """What stands in for a unit that is taken out."""

    @property
    def how(self) -> str:
        """What removing means here, in a few words for a table or a report."""

    def apply(self) -> AbstractContextManager[None]:
        """The network without the unit, until the context ends."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The module whose one call computes one softmax over keys, and how the keys lie on their grid.

    `windows` gives the windows into which a grid of a size is cut; None means that attention is global.
    """

    module: nn.Module
    keys: Layout
    windows: Callable[[Size], Windows] | None = None


@dataclass(frozen=True, eq=False)
class Unit:
    """One step of the forward pass: what it is, where its ends can be read, and how to take it out.

    `input` is the state before the unit and `output` the state after the residual addition (after the block's
    last activation, if it has one). `module` is the unit's own module (the attention, the MLP, the block of
    convs, the stem ...) and `norm` its norm, for surgery; `block` names the block that it is part of. A head's
    norm is the final one where it acts on the last state, tokens or feature map (PiT: on the class tokens of it);
    None where the network has none, or one behind its pooling. `activation` is where the values behind the last
    activation function of the branch can be read, the hidden neurons of an MLP, which lead to its last linear layer
    or conv; None where there is no such function, as in attention.
    """

    name: str
    kind: Kind
    stage: int
    module: nn.Module
    input: Site
    output: Site
    norm: nn.Module | None = None
    block: str | None = None
    residual: Residual | None = None
    removal: Removal | None = None
    attention: AttentionSpec | None = None
    activation: Site | None = None
    depth: int = 0
    """The unit's place in the network, from 0; the anatomy sets it."""

    @property
    def branch(self) -> Site | None:
        """Where what the unit adds to the state can be read; None without a residual."""
        return None if self.residual is None else self.residual.branch

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.kind}, stage={self.stage}, depth={self.depth})"


@dataclass(frozen=True, eq=False)
class Block:
    """The units that share a block, such as the attention and the MLP of a transformer block."""

    name: str
    stage: int
    units: tuple[Unit, ...]

    def unit(self, kind: Kind) -> Unit | None:
        """The block's unit of that kind, if it has one."""
        return next((unit for unit in self.units if unit.kind == kind), None)
