"""`Anatomy`: a network as units, and the forward pass that checks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError, did_you_mean, first_line
from vitclinic.anatomy.agreement import find_disagreement
from vitclinic.anatomy.families import Family
from vitclinic.anatomy.forward import eval_mode
from vitclinic.anatomy.observation.observe import observe
from vitclinic.anatomy.sites import Layout, Site, Size, onto_grid, taps, watch
from vitclinic.anatomy.units import Block, Kind, Unit
from vitclinic.anatomy.wrappers import (
    call_with_images,
    check_weights,
    find_example,
    unwrap,
    unwrap_parallel,
    weight_like,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each unit's output for one image, without the batch axis, by the unit's name."""


class Anatomy:
    """The units of a network, in the order of its forward pass.

    `network` is the network inside all wrappers (torch.compile, DDP, normalization); names and modules are those of the
    inner network. An anatomy describes the modules that it saw: after surgery, create a new one. `print(anatomy)`
    shows it as a table.

    Attributes:
        family: The family's name or, if the network was observed, its class.
        network: The network inside all wrappers.
        units: Its units.
        notes: What could not be settled, in sentences.
        observed: True if the units were found by observation and not by a family.
        image: (channels, height, width) of the image that was passed through the network.

    Example:
        >>> import timm
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224"))
        >>> [unit.name for unit in anatomy.units][:4]
        ['stem', 'position', 'blocks.0.msa', 'blocks.0.mlp']
    """

    def __init__(
        self,
        family: str,
        network: nn.Module,
        units: tuple[Unit, ...],
        grids: dict[Layout, Size],
        notes: tuple[str, ...] = (),
        *,
        observed: bool = False,
        image: tuple[int, ...] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        self.family = family
        self.network = network
        self.units = units
        self.notes = notes
        self.observed = observed
        self.image = image
        self._grids = grids
        self._shapes = shapes or {}

    @classmethod
    def of(cls, network: nn.Module, example: Tensor | None = None) -> Anatomy:
        """Examine a network with one forward pass.

        A network of a known family is described by it. Of any other, the operations of the pass are recorded, and its
        units are what lies between residual additions (`anatomy/observation/`). Either way, the pass checks that total
        = skip + branch for every residual unit, to 1e-5 of the largest value (or to the rounding error of the network's
        dtype, if that is coarser).

        Args:
            network: Any network that takes images, possibly wrapped.
            example: A batch whose first image is passed through the network, wrappers included (they may normalize or
                resize it), except for DDP, whose processes would wait for each other. By default, noise of a size that
                the network takes is passed to the network inside the wrappers. Grids are those of this image: for
                another size, create another anatomy.

        Returns:
            The anatomy of the network inside all wrappers; its `notes` say what could not be settled.

        Raises:
            UnknownStructureError: The pass shows no units.
            AnatomyError: The network is not built as a registered family says, or cannot take the example; the message
                names the first unit that fails.
        """
        core, family = unwrap(network)
        check_weights(core)
        entrance = core if example is None else unwrap_parallel(network)
        if family is not None:
            try:
                found = cls._of_family(core, family, entrance, example)
            except AnatomyError:
                if not family.built_in:
                    raise
            else:
                return found if family.built_in else found._compare(family, entrance, example)
        if example is None:
            example = find_example(core, family)
        return cls._by_observation(core, entrance, example)

    @classmethod
    def _of_family(cls, core: nn.Module, family: Family, entrance: nn.Module, example: Tensor | None) -> Anatomy:
        try:
            units = tuple(replace(unit, depth=depth) for depth, unit in enumerate(family.units(core)))
            if example is None:
                example = find_example(core, family)
            image = example[:1].to(weight_like(core))
            grids, shapes = _check_units(entrance, units, image)
            return cls(family.name, core, units, grids, image=tuple(image.shape[1:]), shapes=shapes)
        except (AttributeError, AssertionError, RuntimeError, LookupError, TypeError, ValueError) as error:
            raise AnatomyError(
                f"{type(core).__name__} belongs to the family {family.name} but is not built like it"
                f" ({first_line(error)}); if parts of it were replaced, register a family for it (docs/anatomy.md)."
            ) from error

    def _compare(self, family: Family, entrance: nn.Module, example: Tensor | None) -> Anatomy:
        """Return this anatomy of a family registered by hand, unless a recorded pass contradicts it.

        A family need not know what treatments change: a treated network is then as observed.
        """
        core = self.network
        example = find_example(core, family) if example is None else example
        try:
            observed = self._by_observation(core, entrance, example)
        except AnatomyError:  # nothing can be seen of this network: what its user says counts
            return self
        image = example[:1].to(weight_like(core))
        if found := find_disagreement(self.units, observed.units, entrance, image):
            if getattr(core, "treated_with", ()):
                return observed
            raise AnatomyError(
                f"the family {family.name} does not describe {type(core).__name__}: {found}; correct its units, or"
                " leave the family out, since this network can be observed (docs/anatomy.md)."
            )
        return self

    @classmethod
    def _by_observation(cls, core: nn.Module, entrance: nn.Module, example: Tensor) -> Anatomy:
        image = example[:1].to(weight_like(core))
        found = observe(core, entrance, torch.cat((image, image.flip(-1))))
        units = tuple(replace(unit, depth=depth) for depth, unit in enumerate(found.units))
        units, doubts, shapes = _drop_wrong_residuals(entrance, units, image)
        grids = {layout: layout.size for layout in _layouts(units) if layout.size is not None}
        notes, seen = (*found.notes, *doubts), tuple(image.shape[1:])
        return cls(type(core).__name__, core, units, grids, notes, observed=True, image=seen, shapes=shapes)

    def __repr__(self) -> str:
        return f"Anatomy({self.family}, {len(self.units)} units)"

    def __str__(self) -> str:
        from vitclinic.anatomy.table import format_anatomy

        return format_anatomy(self)

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

    def output_grid(self, unit: Unit) -> Size | None:
        """Return (rows, columns) of the features after a unit; None if they are on no grid."""
        layout, shape = unit.output.layout, self._shapes.get(unit.name, ())
        if not layout.spatial:
            return None
        if len(shape) == 3:
            height, width = shape[:2] if layout.channels_last else shape[1:]
            return height, width
        return self._grids.get(layout)

    def output_channels(self, unit: Unit) -> int | None:
        """Return the number of channels of the features after a unit; None if their axes are not known."""
        layout, shape = unit.output.layout, self._shapes.get(unit.name, ())
        if not shape or (not layout.spatial and len(shape) > 1):
            return None
        return shape[0] if len(shape) == 3 and not layout.channels_last else shape[-1]

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
def _check_units(network: nn.Module, units: tuple[Unit, ...], example: Tensor) -> tuple[dict[Layout, Size], Shapes]:
    """Run `example` through the network in eval mode, check every unit, and return grids and shapes of outputs.

    Checked: something passes every site, and total = skip + branch for every residual.
    """
    with eval_mode(network), _measure_grids(_layouts(units)) as grids, taps(_sites(units)) as seen:
        call_with_images(network, example)
    for unit in units:
        if found := _find_difference(unit, seen):
            raise AnatomyError(
                f"in {unit.name} the output is not skip + branch ({found}), so its family does not fit this "
                "network; register one that does (docs/anatomy.md)."
            )
    return grids, _output_shapes(units, seen)


@torch.no_grad()
def _drop_wrong_residuals(
    network: nn.Module, units: tuple[Unit, ...], example: Tensor
) -> tuple[tuple[Unit, ...], list[str], Shapes]:
    """Run `example` through an observed network, and return its units without residuals that do not add up.

    The sentences say which those are; the shapes are those of outputs.
    """
    with eval_mode(network), taps(_sites(units)) as seen:
        call_with_images(network, example)
    checked, doubts = [], []
    for unit in units:
        found = _find_difference(unit, seen)
        if found is not None:
            doubts.append(f"the output of {unit.name} is not skip + branch ({found}), so it cannot be removed.")
        checked.append(unit if found is None else replace(unit, residual=None, removal=None))
    return tuple(checked), doubts, _output_shapes(units, seen)


def _output_shapes(units: tuple[Unit, ...], seen: Mapping[tuple[str, str], Tensor]) -> Shapes:
    return {unit.name: tuple(seen[unit.name, "output"].shape[1:]) for unit in units}


def _sites(units: tuple[Unit, ...]) -> dict[tuple[str, str], Site]:
    """Return all sites at which units are read."""
    sites: dict[tuple[str, str], Site] = {}
    for unit in units:
        sites[unit.name, "input"], sites[unit.name, "output"] = unit.input, unit.output
        if unit.residual is not None:
            sites |= {(unit.name, part): site for part, site in unit.residual.sites.items()}
    return sites


def _layouts(units: tuple[Unit, ...]) -> set[Layout]:
    """Return the layouts of all sites, and of the keys of attention."""
    keys = {unit.attention.keys for unit in units if unit.attention is not None}
    return keys | {site.layout for site in _sites(units).values()}


def _find_difference(unit: Unit, seen: Mapping[tuple[str, str], Tensor]) -> str | None:
    """Return how total and skip + branch differ, or None if they do not, or the unit has no residual.

    Libraries reshape between steps, so only the number of values must agree.
    """
    if unit.residual is None:
        return None
    total, *parts = (seen[unit.name, part] for part in ("total", *(unit.residual.sites.keys() - {"total"})))
    tolerance = max(1e-5, 8 * torch.finfo(total.dtype).eps)
    if not total.isfinite().all():
        raise AnatomyError(f"the values after {unit.name} are not finite, so nothing can be checked or measured.")
    if any(part.numel() != total.numel() for part in parts):
        return f"their shapes are {', '.join(str(tuple(part.shape)) for part in (total, *parts))}"
    difference = (total.flatten() - sum(part.flatten() for part in parts)).abs().max()
    if difference <= tolerance * total.abs().max():
        return None
    return f"they differ by {difference:.1e} where values reach {total.abs().max():.1e}"


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
