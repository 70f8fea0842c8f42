"""The parts of an anatomy: units, their residual, their removal and their attention.

A family (`vitclinic.anatomy.families`) walks a network and yields its units in the order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import nn

    from vitclinic.anatomy.maps import SeenMap, Windows
    from vitclinic.anatomy.sites import Layout, Site, Size

Kind = Literal["stem", "position", "msa", "mlp", "token_mlp", "conv", "pool", "head"]
"""`pool` is the subsampling between stages; `token_mlp` mixes tokens by fixed weights."""


@dataclass(frozen=True, eq=False)
class Residual:
    """Sites of a residual step: total = skip + branch, checked to 1e-5 when a network is examined.

    Args:
        skip: The state before the step.
        branch: What the step adds to it.
        total: Their sum.
        beside: Other branches that are added at once, as in x + (attention(x) + mlp(x)): total = skip + all branches.
    """

    skip: Site
    branch: Site
    total: Site
    beside: tuple[Site, ...] = ()

    @property
    def sites(self) -> dict[str, Site]:
        """All sites by name: `skip`, `branch`, `total`, and `beside 0` and so on."""
        named = {"skip": self.skip, "branch": self.branch, "total": self.total}
        return named | {f"beside {number}": site for number, site in enumerate(self.beside)}


class Removal(Protocol):
    """Protocol of a way to remove a unit."""

    @property
    def how(self) -> str:
        """Description of the removal in a few words, for a table or a report."""

    def apply(self) -> AbstractContextManager[None]:
        """Remove the unit from the network until the context ends."""


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """A module that computes an attention map over keys per call, and the layout of the keys.

    Args:
        module: The attention module.
        keys: The layout of the keys on their grid.
        windows: Function from the size of a grid to its windows; None for global attention.
        seen: The map as a recorded pass showed it, for a network of no known family.
    """

    module: nn.Module
    keys: Layout
    windows: Callable[[Size], Windows] | None = None
    seen: SeenMap | None = None

    @property
    def is_windowed(self) -> bool:
        """True if queries see the keys of their window only, and not those of the whole grid."""
        return self.windows is not None if self.seen is None else self.seen.windows > 1


@dataclass(frozen=True, eq=False)
class Unit:
    """One step of the forward pass: its kind, the sites at which it can be read, and how to remove it.

    Args:
        name: The unit's name, such as `blocks.0.msa`.
        kind: `stem`, `position`, `msa`, `mlp`, `token_mlp`, `conv`, `pool` or `head`.
        stage: The stage it belongs to, from 0.
        module: The unit's own module (attention, MLP, block of convs, stem, ...), for surgery; None if no one module
            does its work alone, as in a network written without modules.
        input: The state before the unit.
        output: The state after the residual addition (and after the block's last activation, if there is one).
        norm: The unit's norm, for surgery. A head's norm is the final one if it acts on the last state, tokens or
            feature map (PiT: on its class tokens); None if the network has none, or has it after pooling.
        block: The name of the block that the unit is part of.
        residual: The sites of its residual addition, if it has one.
        removal: The way to remove it; None if it cannot be removed.
        attention: The attention, if there is a map to record.
        activation: The site after the last activation function of the branch: the hidden neurons of an MLP, which lead
            to its last linear layer or conv. None if there is no such function, as in attention.
        parameters: The parameters that the unit uses; None for those of its module and norm.
        depth: The unit's place in the network, from 0; set by the anatomy.
    """

    name: str
    kind: Kind
    stage: int
    module: nn.Module | None
    input: Site
    output: Site
    norm: nn.Module | None = None
    block: str | None = None
    residual: Residual | None = None
    removal: Removal | None = None
    attention: AttentionSpec | None = None
    activation: Site | None = None
    parameters: tuple[nn.Parameter, ...] | None = None
    depth: int = 0
    """The unit's place in the network, from 0; the anatomy sets it."""

    @property
    def branch(self) -> Site | None:
        """Site of what the unit adds to the state; None without a residual."""
        return None if self.residual is None else self.residual.branch

    @property
    def runs_again(self) -> bool:
        """True if the network runs the unit's code again on the same images, apart from the run that is read."""
        return self.residual is not None and self.removal is None

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.kind}, stage={self.stage}, depth={self.depth})"


@dataclass(frozen=True, eq=False)
class Block:
    """Units that share a block, such as the attention and the MLP of a transformer block."""

    name: str
    stage: int
    units: tuple[Unit, ...]

    def unit(self, kind: Kind) -> Unit | None:
        """Return the block's unit of a kind, or None."""
        return next((unit for unit in self.units if unit.kind == kind), None)
