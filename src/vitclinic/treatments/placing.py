"""Insertion of a new part into the blocks of a network.

A part becomes a child of the module it acts on, called by a hook. No module is replaced or wrapped: names in the
state dict stay the same, weights load before or after the surgery, and the part belongs to the unit
(`vitclinic.anatomy`) of that module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Block, Site, Unit, into, out_of, stream
from vitclinic.anatomy.forward import look
from vitclinic.anatomy.removal import Silence
from vitclinic.anatomy.sites import watch
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import (
    examine,
    is_linear,
    layers_in,
    missing,
    own_module,
    run_once,
)
from vitclinic.treatments.treatment import Treatment

Position = Literal["mlp_end", "mlp_mid", "mlp_front", "msa_end", "both"]
"""Before the first (front), before the second (mid) or after the second (end) layer of the MLP; after the attention;
or after the MLP and after the attention."""


def _check_layers(value: Any) -> Any:
    """Check `layers` before pydantic does, which would print one error per type of the union."""
    numbers = value if isinstance(value, list) else []
    listed = numbers and all(type(number) is int for number in numbers) and len(set(numbers)) == len(numbers)
    if value not in ("upper", "all", None) and not listed:
        raise ValueError("must be upper, all or a list of distinct block numbers")
    return value


Layers = Annotated[Literal["upper", "all"] | list[int], BeforeValidator(_check_layers)]
"""The upper half of the blocks, all of them, or these, counted from 0 over the whole network."""

POSITION = "where: mlp_end, mlp_mid (after the activation), mlp_front, msa_end, or both (mlp_end and msa_end)"
LAYERS = "which blocks: upper (the upper half), all, or a list of block numbers from 0 over the whole network"

PART = "an MLP over channels that sees all tokens"

Maker = Callable[[int], nn.Module]
Key = TypeVar("Key", bound=Hashable)


class _Place(NamedTuple):
    """Where a part goes: a site, and whether that is the end of a unit's branch instead of that of its own module."""

    unit: Unit
    site: Site
    branch: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that tells places in one module apart: of a branch without a module of its own, which addition it is."""
        return (self.site.end, self.site.addition, self.site.call) if self.branch else (self.site.end,)


class _Axes(NamedTuple):
    """The axes of images and channels in a tensor of tokens."""

    batch: int
    channel: int

    def to_tokens(self, x: Tensor) -> Tensor:
        """Return a view with the images first and the channels last."""
        return x.movedim((self.batch, self.channel), (0, -1))

    def back(self, x: Tensor) -> Tensor:
        """Undo `to_tokens`."""
        return x.movedim((0, -1), (self.batch, self.channel))


def place(
    treatment: Treatment, network: nn.Module, position: Position, layers: Layers, make: Maker, spec: ImageSpec
) -> None:
    """Insert `make(width)`, a map of tokens, under the treatment's name at `position` of each of `layers`."""
    anatomy = examine(treatment, network, spec)
    if not anatomy.of_kind("msa", "mlp"):
        raise missing(treatment, network)
    places = _places(anatomy, position, layers, treatment, spec)
    found = _measure(anatomy, places, treatment, spec)
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    placed: dict[nn.Module, list[Any]] = {}
    for one, (width, axes) in zip(places, found, strict=True):
        host = _host(one.site.module)
        there = placed.setdefault(host, [])
        if one.key not in there:  # a module that runs in several blocks has one part
            name = f"{treatment.name}_{len(there) + 1}" if there else treatment.name
            there.append(one.key)
            host.add_module(name, make(width).to(like).train(host.training))
            _hook(one, host, name, axes)


def select_blocks(blocks: Sequence[Block], layers: Layers, name: str) -> list[Block]:
    """Return the blocks that `layers` selects; the middle block of an odd number belongs to the upper half."""
    if layers == "all":
        return list(blocks)
    if layers == "upper":
        return list(blocks[len(blocks) // 2 :])
    if outside := [number for number in layers if not 0 <= number < len(blocks)]:
        raise TreatmentError(
            f"{name}: 'layers' lists block {outside[0]}, but this network has blocks 0 to {len(blocks) - 1}."
        )
    return [block for number, block in enumerate(blocks) if number in layers]


def _places(
    anatomy: Anatomy, position: Position, layers: Layers, treatment: Treatment, spec: ImageSpec
) -> list[_Place]:
    """Return where `position` is in the selected blocks.

    With `upper` and `all`, blocks without such a place (an `extra_block`) are skipped.
    """
    blocks = [block for block in anatomy.blocks if any(unit.kind != "pool" for unit in block.units)]
    blocks = blocks or _blocks_without_modules(anatomy)
    chosen = select_blocks(blocks, layers, treatment.name)
    positions: list[Position] = ["msa_end", "mlp_end"] if position == "both" else [position]
    for each in positions:
        without = [block for block in chosen if _unit(block, each) is None]
        if without and (isinstance(layers, list) or without == chosen):
            having = [block for block in blocks if _unit(block, each)]
            if not having:
                advice = "use an mlp position" if each == "msa_end" else "use another network"
                raise missing(treatment, anatomy.network, f"{_lacking(without[0], each)}; {advice}")
            if isinstance(layers, list):
                lacking = _lacking(without[0], each)
                raise TreatmentError(f"{treatment.name} does not fit at {each}: {lacking}; leave it out of 'layers'.")
            chosen = select_blocks(having, layers, treatment.name)  # the last blocks see a class token alone (CaiT)
    found = [(each, unit) for block in chosen for each in positions if (unit := _unit(block, each)) is not None]
    ran = layers_in(anatomy, [unit for _, unit in found], spec)
    ending = _end_at_width(anatomy, [unit for each, unit in found if each.endswith("_end")], spec)
    places = [_place_in(anatomy, unit, each, ran[unit.name], treatment, unit.name in ending) for each, unit in found]
    units = [unit for _, unit in found]
    return [_keep_to_runs(anatomy, one, units, treatment) for one in places]


def _keep_to_runs(anatomy: Anatomy, one: _Place, chosen: Sequence[Unit], treatment: Treatment) -> _Place:
    """Return a place that is met in the runs of its module that belong to chosen units, and in no others.

    A module may run in several blocks, of which only some are chosen; or all of a network runs again, which is read
    once and treated each time.
    """
    if one.branch:
        return one._replace(site=replace(one.site, within=None)) if one.unit.runs_again else one
    module = own_module(anatomy, one.unit)
    sharing = [unit for unit in anatomy.units if module is not None and unit.module is module]
    if all(unit in chosen for unit in sharing):
        return one
    if one.site.end == "in" or one.site.module is not _unwrap_sequential(module or one.site.module, -1):
        raise TreatmentError(
            f"{treatment.name} does not fit here: {one.unit.name} shares its layers with other units, and 'layers'"
            " leaves some of them out; use layers: all, or the position mlp_end."
        )
    end = _end(one.unit)
    assert end is not None  # checked when it was chosen
    return _Place(one.unit, end, branch=True)


def _blocks_without_modules(anatomy: Anatomy) -> list[Block]:
    """Return the blocks of a network without modules for them: a block begins where a kind of unit comes again."""
    groups: list[list[Unit]] = []
    for unit in anatomy.of_kind("msa", "mlp"):
        if not groups or unit.kind in [other.kind for other in groups[-1]]:
            groups.append([])
        groups[-1].append(unit)
    return [Block(units[0].name, units[0].stage, tuple(units)) for units in groups]


def _unit(block: Block, position: Position) -> Unit | None:
    """Return the block's unit at a position, unless it sees the class token alone."""
    unit = block.unit("msa" if position == "msa_end" else "mlp")
    end = None if unit is None else _end(unit)
    return None if end is None or not end.layout.spatial else unit


def _end(unit: Unit) -> Site | None:
    """Return the end of a unit's branch, which may be scaled together with others before it is added."""
    return unit.removal.branch if unit.branch is None and isinstance(unit.removal, Silence) else unit.branch


def _lacking(block: Block, position: Position) -> str:
    return f"{block.name} has no {'attention' if position == 'msa_end' else 'MLP on its channels'}"


def _place_in(
    anatomy: Anatomy, unit: Unit, position: Position, ran: list[nn.Module], treatment: Treatment, at_width: bool
) -> _Place:
    """Return the place of `position` in a unit whose layers are `ran`, in this order.

    `at_width` says that the unit is a module that returns to the network's width.
    """
    name, layout = treatment.name, unit.output.layout
    if position == "msa_end" and unit.attention is not None and unit.attention.windows is not None:
        raise _one_window(unit, position, name)
    linear = [layer for layer in ran if is_linear(layer)]
    if position == "mlp_mid":
        if len(linear) < 2:
            raise TreatmentError(f"{name} does not fit at mlp_mid: {unit.name} has no two linear layers; use mlp_end.")
        return _Place(unit, into(linear[-1], layout))
    whole = own_module(anatomy, unit)
    if position == "mlp_front":
        if whole is None and not linear:
            raise TreatmentError(f"{name} does not fit at mlp_front: {unit.name} has no linear layer; use mlp_end.")
        return _Place(unit, into(linear[0] if whole is None else _unwrap_sequential(whole, 0), layout))
    if whole is not None and at_width:
        return _Place(unit, out_of(_unwrap_sequential(whole, -1), layout))
    end = _end(unit)
    assert end is not None  # checked when it was chosen
    return _Place(unit, end, branch=True)


def _one_window(unit: Unit, position: Position, name: str) -> TreatmentError:
    return TreatmentError(
        f"{name} does not fit at {position}: the attention of {unit.block} sees one window at a time, but"
        " the mean is over all tokens; use an mlp position."
    )


def _end_at_width(anatomy: Anatomy, units: Sequence[Unit], spec: ImageSpec) -> set[str]:
    """Return the names of the units whose own module returns to the network's width.

    In transformers 4 an MLP is two modules, the first of which does not.
    """
    owned = [(unit, module) for unit in units if (module := own_module(anatomy, unit)) is not None]
    sites = {(unit.name, "module"): out_of(module, unit.output.layout) for unit, module in owned}
    shapes = _shapes(anatomy, sites | {(unit.name, "state"): unit.output for unit, _ in owned}, spec)
    pairs = {unit.name: (shapes[unit.name, "module"], shapes[unit.name, "state"]) for unit, _ in owned}
    return {name for name, (module, state) in pairs.items() if module[-1] == state[-1] or module == state}


def _shapes(anatomy: Anatomy, sites: Mapping[Key, Site], spec: ImageSpec, batch: int = 1) -> dict[Key, torch.Size]:
    """Return the shapes at these sites, from one pass of `batch` images."""
    shapes: dict[Key, torch.Size] = {}
    if sites:
        with stream(sites, lambda key, x: shapes.update({key: x.shape})):
            run_once(anatomy.network, spec, batch)
    return shapes


def _unwrap_sequential(module: nn.Module, which: int) -> nn.Module:
    """Return the module, or a Sequential's first or last one: a new child of the Sequential would run as a layer."""
    while isinstance(module, nn.Sequential):
        module = module[which]
    return module


def _host(module: nn.Module) -> nn.Module:
    """Return the module that the part becomes a child of."""
    return _unwrap_sequential(module, -1)


def _measure(
    anatomy: Anatomy, places: Sequence[_Place], treatment: Treatment, spec: ImageSpec
) -> list[tuple[int, _Axes]]:
    """Return the number of channels at each place, and the axes there, from a pass of one image and one of two."""
    sites = {number: one.site for number, one in enumerate(places)}
    alone, both = (_shapes(anatomy, sites, spec, batch) for batch in (1, 2))
    return [_find_axes(one, alone[number], both[number], treatment) for number, one in enumerate(places)]


def _find_axes(one: _Place, alone: torch.Size, both: torch.Size, treatment: Treatment) -> tuple[int, _Axes]:
    """Return channels and axes of a place, from the shapes there for one image and for two."""
    changing = [axis for axis, (of_one, of_two) in enumerate(zip(alone, both, strict=True)) if of_one != of_two]
    if len(changing) != 1 or alone[changing[0]] != 1:
        raise _one_window(one.unit, "msa_end" if one.unit.kind == "msa" else "mlp_end", treatment.name)
    channels_first = isinstance(one.site.module, nn.Conv2d) or (len(alone) == 4 and not one.site.layout.channels_last)
    axes = _Axes(changing[0], 1 if channels_first else len(alone) - 1)
    return int(alone[axes.channel]), axes


def _hook(one: _Place, host: nn.Module, name: str, axes: _Axes) -> None:
    plain = axes == _Axes(0, axes.channel) and axes.channel > 1
    if one.branch:
        watch(one.site, _AtBranch(host, name, axes).apply)
    elif one.site.end == "in":
        one.site.module.register_forward_pre_hook(partial(_before, name) if plain else partial(_before, name, axes))
    else:
        one.site.module.register_forward_hook(partial(_after, name) if plain else partial(_after, name, axes))


class _AtBranch:
    """A part at the end of a branch that is not the end of a module of its own."""

    def __init__(self, host: nn.Module, name: str, axes: _Axes) -> None:
        self._host, self._name, self._axes = host, name, axes

    def apply(self, x: Tensor) -> Tensor:
        return _apply(self._host, self._name, self._axes, x)


# Hooks look the part up by name in the module they are called with, so that a copied network uses its own part.


def _before(name: str, *axes_and_call: Any) -> tuple[Any, ...]:
    *axes, module, args = axes_and_call
    return (_apply(module, name, axes[0] if axes else None, args[0]), *args[1:])


def _after(name: str, *axes_and_call: Any) -> Any:
    *axes, module, _, output = axes_and_call
    if isinstance(output, Tensor):
        return _apply(module, name, axes[0] if axes else None, output)
    first = _apply(module, name, axes[0] if axes else None, output[0])
    return (first, *output[1:])  # an attention that also returns its weights


def _apply(host: nn.Module, name: str, axes: _Axes | None, x: Tensor) -> Tensor:
    part = host.get_submodule(name)
    with look():  # the part's sums are none of the network's, which others find by their number
        y: Tensor = part(x) if axes is None else axes.back(part(axes.to_tokens(x)))
    return y


def mean_over_tokens(x_bnd: Tensor) -> Tensor:
    """Return the mean over all tokens, prefix tokens included, as [B, 1, D]; on a grid as [B, 1, 1, D]."""
    return x_bnd.mean(dim=tuple(range(1, x_bnd.ndim - 1)), keepdim=True)
