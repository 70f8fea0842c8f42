"""The parts of an anatomy: units, their residual, their attention, their parameters, and ways of removing them.

A family (`vitclinic.anatomy.families`) walks a network and yields its units in the order of the forward pass. Each
removal is undone when its context ends, even after an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vitclinic.anatomy.forward import Removable, eager
from vitclinic.anatomy.sites import Site, watch

if TYPE_CHECKING:
    from vitclinic.anatomy.anatomy import Anatomy
    from vitclinic.anatomy.maps import SeenMap, Windows
    from vitclinic.anatomy.sites import Layout, Size


Kind = Literal["stem", "position", "msa", "mlp", "token_mlp", "conv", "pool", "head"]
"""`pool` is the subsampling between stages; `token_mlp` mixes tokens by fixed weights."""


@dataclass(frozen=True, eq=False)
class Residual:
    """Sites of a residual step: total = skip + branch, checked to 1e-5 when a network is examined."""

    skip: Site
    branch: Site
    total: Site


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


@dataclass(frozen=True, eq=False)
class Silence:
    """Removal that sets a residual branch to zero after its last norm and scale, so that the state passes unchanged.

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


def parameters_used(unit: Unit) -> tuple[nn.Parameter, ...]:
    """Return the parameters that a unit uses, each once: those it states, else those of its module and norm.

    Example:
        >>> from vitclinic.anatomy import into, out_of
        >>> layer = nn.Linear(2, 3)
        >>> [tuple(p.shape) for p in parameters_used(Unit("head", "head", 0, layer, into(layer), out_of(layer)))]
        [(3, 2), (3,)]
    """
    if unit.parameters is not None:
        return unit.parameters
    modules = [module for module in (unit.module, unit.norm) if module is not None]
    found = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    if isinstance(unit.removal, Erase):
        found[unit.removal.parameter] = None
    return tuple(found)


def assign_parameters(units: Iterable[Unit]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by its name; one that several units use belongs to the first of them."""
    taken: set[int] = set()
    owned: dict[str, list[nn.Parameter]] = {}
    for unit in units:
        owned[unit.name] = [parameter for parameter in parameters_used(unit) if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in owned[unit.name]}
    return owned


def parameters_by_unit(anatomy: Anatomy) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by the unit's name; no parameter belongs to two units.

    A unit owns the parameters that it uses and that no unit before it does: of a family's unit, those of its module and
    its norm; the position embedding is a unit of its own. Some parameters belong to no unit, such as a class token or a
    norm after the stem.

    Example:
        >>> import timm, torch
        >>> from vitclinic.anatomy import Anatomy
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224", img_size=32), torch.rand(1, 3, 32, 32))
        >>> len(parameters_by_unit(anatomy)["blocks.0.mlp"])  # two linear layers and a norm
        6
    """
    return assign_parameters(anatomy.units)
