"""Insertion of a new part into the blocks of a network.

A part becomes a child of the module it acts on, called by a hook. No module is replaced or wrapped: names in the
state dict stay the same, weights load before or after the surgery, and the part belongs to the unit
(`vitclinic.anatomy`) of that module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Block, Site, Unit, eval_mode, into, out_of, taps
from vitclinic.data import ImageSpec

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

FAMILIES = (
    *("timm ViT", "timm PiT", "timm Swin", "timm Swin V2", "timm MLP-Mixer"),
    *("torchvision ViT", "torchvision Swin"),
    *("Hugging Face ViT", "Hugging Face DeiT", "Hugging Face Swin"),
)
"""The families whose blocks have an MLP that sees all tokens."""

Maker = Callable[[int], nn.Module]


def place(network: nn.Module, name: str, position: Position, layers: Layers, make: Maker, spec: ImageSpec) -> None:
    """Insert `make(width)`, a map from tokens to tokens, under the name `name` at `position` of each of `layers`."""
    ends = _ends(Anatomy.of(network).blocks, position, layers, name)
    widths = _widths(network, ends, name, spec)
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    for (_, site), width in zip(ends, widths, strict=True):
        _insert(site, name, make(width).to(like))


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


def _ends(blocks: Sequence[Block], position: Position, layers: Layers, name: str) -> list[tuple[Unit, Site]]:
    """Return the sites of `position` in the selected blocks, each with its unit.

    With `upper` and `all`, blocks without such a site (an `extra_block`) are skipped.
    """
    chosen = select_blocks(blocks, layers, name)
    positions: list[Position] = ["msa_end", "mlp_end"] if position == "both" else [position]
    for each in positions:
        without = [block for block in chosen if _unit(block, each) is None]
        if without and (isinstance(layers, list) or without == chosen):
            nowhere = all(_unit(block, each) is None for block in blocks)
            raise _missing(without[0], each, layers, name, nowhere)
    found = ((block, each, _unit(block, each)) for block in chosen for each in positions)
    return [(unit, _end(block, unit, each, name)) for block, each, unit in found if unit is not None]


def _unit(block: Block, position: Position) -> Unit | None:
    return block.unit("msa" if position == "msa_end" else "mlp")


def _missing(block: Block, position: Position, layers: Layers, name: str, nowhere: bool) -> TreatmentError:
    missing = "attention" if position == "msa_end" else "MLP on its channels"
    advice = "leave it out of 'layers'" if isinstance(layers, list) else "choose other 'layers'"
    if nowhere:
        advice = "use an mlp position" if position == "msa_end" else "use another network"
    return TreatmentError(f"{name} does not fit at {position}: {block.name} has no {missing}; {advice}.")


def _end(block: Block, unit: Unit, position: Position, name: str) -> Site:
    """Return the site of `position` in a unit."""
    if position == "msa_end" and unit.attention is not None and unit.attention.windows is not None:
        raise TreatmentError(
            f"{name} does not fit at {position}: the attention of {block.name} sees one window at a time, but"
            " the mean is over all tokens; use an mlp position."
        )
    if position == "mlp_mid":
        return into(_second_layer(unit, name), unit.output.layout)
    front = position == "mlp_front"
    module = _unwrap_sequential(unit.module, 0 if front else -1)
    return (into if front else out_of)(module, unit.output.layout)


def _second_layer(mlp: Unit, name: str) -> nn.Module:
    """Return the layer that projects back to the network's width; in a gated MLP it is the third."""
    # By attribute, not by class: the layers of ffn_variant are linear too.
    linears = [module for module in own_modules(mlp.module) if isinstance(getattr(module, "in_features", None), int)]
    if len(linears) < 2:
        raise TreatmentError(f"{name} does not fit at mlp_mid: {mlp.name} has no two linear layers; use mlp_end.")
    return linears[-1]


def _unwrap_sequential(module: nn.Module, which: int) -> nn.Module:
    """Return the module, or a Sequential's first or last one: a new child of the Sequential would run as a layer."""
    while isinstance(module, nn.Sequential):
        module = module[which]
    return module


@torch.no_grad()
def _widths(network: nn.Module, ends: list[tuple[Unit, Site]], name: str, spec: ImageSpec) -> list[int]:
    """Measure the number of channels at each site with a forward pass, and check the position of the site."""
    sites: dict[tuple[str, int], Site] = {}
    for index, (unit, site) in enumerate(ends):
        sites |= {("part", index): site, ("state", index): unit.output}
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    with eval_mode(network), taps(sites) as seen:
        network(torch.zeros(1, spec.in_chans, *spec.img_size, dtype=like.dtype, device=like.device))
    for index, (unit, site) in enumerate(ends):
        if site.end == "out" and seen["part", index].shape[-1] != seen["state", index].shape[-1]:
            raise TreatmentError(
                f"{name} does not fit at the end of {unit.name}: its module ends before it returns to the network's"
                " width, as in transformers 4; use transformers 5."
            )
    return [seen["part", index].shape[-1] for index in range(len(ends))]


def _insert(site: Site, name: str, part: nn.Module) -> None:
    site.module.add_module(name, part.train(site.module.training))
    if site.end == "in":
        site.module.register_forward_pre_hook(partial(_before, name))
    else:
        site.module.register_forward_hook(partial(_after, name))


# Hooks look the part up by name in the module they are called with, so that a copied network uses its own part.


def _before(name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (module.get_submodule(name)(args[0]), *args[1:])


def _after(name: str, module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
    part = module.get_submodule(name)
    if isinstance(output, Tensor):
        return part(output)
    return (part(output[0]), *output[1:])  # an attention that also returns its weights


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Return `module` and all modules in it, in order, except for parts inserted by treatments."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    placed = {hook.args[0] for hook in hooks if isinstance(hook, partial) and hook.func in (_before, _after)}
    children = [child for name, child in module.named_children() if name not in placed]
    return [module, *(inner for child in children for inner in own_modules(child))]


def mean_over_tokens(x_bnd: Tensor) -> Tensor:
    """Return the mean over all tokens, prefix tokens included, as [B, 1, D]; on a grid as [B, 1, 1, D]."""
    return x_bnd.mean(dim=tuple(range(1, x_bnd.ndim - 1)), keepdim=True)
