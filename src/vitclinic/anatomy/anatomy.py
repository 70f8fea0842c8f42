"""`Anatomy`: a network as units, and the forward pass that checks them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic._core.errors import AnatomyError, did_you_mean
from vitclinic.anatomy.eager import eval_mode
from vitclinic.anatomy.families import recognise
from vitclinic.anatomy.sites import Layout, Site, Size, onto_grid, watch
from vitclinic.anatomy.taps import taps
from vitclinic.anatomy.units import Block, Kind, Unit


class Anatomy:
    """The units of a network, in the order of its forward pass.

    `network` is the network inside all wrappers (torch.compile, DDP, normalization); names and modules are those of the
    inner network. An anatomy describes the modules that it saw: after surgery, create a new one.

    Example:
        >>> import timm
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224"))
        >>> [unit.name for unit in anatomy.units][:4]
        ['stem', 'position', 'blocks.0.msa', 'blocks.0.mlp']
    """

    def __init__(self, family: str, network: nn.Module, units: tuple[Unit, ...], grids: dict[Layout, Size]) -> None:
        self.family = family
        self.network = network
        self.units = units
        self._grids = grids

    @classmethod
    def of(cls, network: nn.Module, example: Tensor | None = None) -> Anatomy:
        """Examine a network with one forward pass.

        The pass checks that total = skip + branch for every residual unit, to 1e-5 of the largest value (or to the
        rounding error of the network's dtype, if that is coarser).

        Args:
            network: A network of a known family, possibly wrapped.
            example: A batch whose first image is passed through the network, wrappers included (they may normalize or
                resize it), except for DDP, whose processes would wait for each other. By default, noise is passed to
                the network inside the wrappers. Grids are those of this image: for another size,
                create another anatomy.

        Returns:
            The anatomy of the network inside all wrappers.

        Raises:
            UnknownStructureError: No family is registered for the network.
            AnatomyError: The network is not built as its family says; the message names the first unit that fails.
        """
        core, family = recognise(network)
        try:
            units = tuple(replace(unit, depth=depth) for depth, unit in enumerate(family.units(core)))
            like = next(parameter for parameter in core.parameters() if parameter.is_floating_point())
            if like.is_meta:
                raise AnatomyError("the network is on the meta device and has no weights; load them first.")
            entrance = network.module if isinstance(network, DistributedDataParallel) else network
            if example is None:
                entrance = core
                generator = torch.Generator().manual_seed(0)
                example = torch.randn(1, *family.input_size(core), generator=generator)
            return cls(family.name, core, units, _check_units(entrance, units, example[:1].to(like)))
        except (AttributeError, AssertionError, RuntimeError, LookupError, TypeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise AnatomyError(
                f"{type(core).__name__} belongs to the family {family.name} but is not built like it ({reason});"
                " if parts of it were replaced, register a family for it (docs/anatomy.md)."
            ) from error

    def __repr__(self) -> str:
        return f"Anatomy({self.family}, {len(self.units)} units)"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the network, each with its units, for surgery on the attention or the MLP of each."""
        inside = (unit for unit in self.units if unit.block is not None)
        groups = ((str(name), tuple(units)) for name, units in groupby(inside, key=lambda unit: unit.block))
        return tuple(Block(name, units[0].stage, units) for name, units in groups)

    def of_kind(self, *kinds: Kind) -> tuple[Unit, ...]:
        """Return the units of these kinds, in order.

        Args:
            kinds: Any of `stem`, `position`, `msa`, `mlp`, `token_mlp`, `conv`, `pool` and `head`.
        """
        return tuple(unit for unit in self.units if unit.kind in kinds)

    def unit(self, name: str) -> Unit:
        """Return the unit with a name.

        Raises:
            AnatomyError: There is no such unit.
        """
        named = {unit.name: unit for unit in self.units}
        if name not in named:
            raise AnatomyError(f"{self.family} has no unit '{name}'.{did_you_mean(name, named)}")
        return named[name]

    def path(self, module: nn.Module) -> str:
        """Return the dotted name of one of the network's modules, for `network.set_submodule`.

        Raises:
            AnatomyError: The module is not part of the network (any more).
        """
        names: dict[int, str] = {id(candidate): name for name, candidate in self.network.named_modules()}
        if id(module) not in names:
            kind = type(module).__name__
            raise AnatomyError(f"this {kind} is not part of the network any more; create a new anatomy.")
        return names[id(module)]

    def size(self, layout: Layout) -> Size:
        """Return (rows, columns) of the flattened grid of `layout`, as seen when the network was examined."""
        return self._grids[layout]

    def grid(self, site: Site, activation: Tensor) -> Tensor:
        """Return an activation as a feature map, with prefix tokens stripped.

        Args:
            site: The site that the activation was read at.
            activation: The activation, as a tap returns it.

        Returns:
            The features, [B, C, H, W].

        Raises:
            AnatomyError: The features have no grid, or one of another size than the example's.
        """
        return onto_grid(site.layout, activation, self._grids.get(site.layout))

    def prefix(self, site: Site, activation: Tensor) -> Tensor:
        """Return the class, distillation and register tokens of an activation, [B, prefix, C].

        Args:
            site: The site that the activation was read at.
            activation: The activation, as a tap returns it.

        Raises:
            AnatomyError: The activation is not a sequence of tokens.
        """
        if activation.ndim != 3:
            raise AnatomyError(f"an activation of shape {tuple(activation.shape)} has no prefix tokens.")
        return activation[:, : site.layout.prefix]

    def remove(self, unit: Unit) -> AbstractContextManager[None]:
        """Take a unit out of the network until the context ends; `unit.removal.how` says how.

        Args:
            unit: The unit to remove.

        Raises:
            AnatomyError: The unit cannot be removed, because it changes the shape of the features.
        """
        if unit.removal is None:
            raise AnatomyError(f"{unit.name} cannot be removed: the layers after it need its output shape.")
        return unit.removal.apply()


@torch.no_grad()
def _check_units(network: nn.Module, units: tuple[Unit, ...], example: Tensor) -> dict[Layout, Size]:
    """Run `example` through the network in eval mode, check every unit, and return the grid of each layout.

    Checked: something passes every site, and total = skip + branch for every residual.
    """
    sites: dict[tuple[str, str], Site] = {}
    layouts: set[Layout] = set()
    for unit in units:
        sites[unit.name, "input"], sites[unit.name, "output"] = unit.input, unit.output
        if unit.residual is not None:
            sites |= {(unit.name, part): getattr(unit.residual, part) for part in ("skip", "branch", "total")}
        if unit.attention is not None:
            layouts.add(unit.attention.keys)
    layouts |= {site.layout for site in sites.values()}
    with eval_mode(network), _measure_grids(layouts) as grids, taps(sites) as seen:
        network(example)
    for unit in units:
        if unit.residual is not None:
            _check_residual(unit, *(seen[unit.name, part] for part in ("skip", "branch", "total")))
    return grids


def _check_residual(unit: Unit, skip: Tensor, branch: Tensor, total: Tensor) -> None:
    """Check that total = skip + branch; libraries reshape between steps, so only the number of values must agree."""
    tolerance = max(1e-5, 8 * torch.finfo(total.dtype).eps)
    if not total.isfinite().all():
        raise AnatomyError(f"the values after {unit.name} are not finite, so nothing can be checked or measured.")
    if skip.numel() == branch.numel() == total.numel():
        difference = (total.flatten() - skip.flatten() - branch.flatten()).abs().max()
        if difference <= tolerance * total.abs().max():
            return
        found = f"they differ by {difference:.1e} where values reach {total.abs().max():.1e}"
    else:
        found = f"their shapes are {tuple(total.shape)}, {tuple(skip.shape)} and {tuple(branch.shape)}"
    raise AnatomyError(
        f"in {unit.name} the output is not skip + branch ({found}), so its family does not fit this "
        "network; register one that does (docs/anatomy.md)."
    )


@contextmanager
def _measure_grids(layouts: set[Layout]) -> Iterator[dict[Layout, Size]]:
    """Yield the size of each layout's grid, filled by the forward pass inside the context."""
    grids: dict[Layout, Size] = {}

    def note(layout: Layout, site: Site, value: Any) -> None:
        grids[layout] = site.size_of(value)

    seen_at = {layout: layout.grid_at for layout in layouts if layout.grid_at is not None}
    handles = [handle for layout, site in seen_at.items() for handle in watch(site, partial(note, layout, site))]
    try:
        yield grids
    finally:
        for handle in handles:
            handle.remove()
    if unseen := {type(site.module).__name__ for layout, site in seen_at.items() if layout not in grids}:
        raise AnatomyError(f"no grid could be read at {', '.join(sorted(unseen))}, so the family does not fit.")
