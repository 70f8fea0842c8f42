"""What a network can be called with: whether it is ready, and which sizes its patches divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vitclinic._core.errors import ModelError

MULTIPLE = 4
"""Sizes are multiples of so many pixels if the network has no patches."""

Size = tuple[int, int]


def check_ready(network: nn.Module, name: str) -> None:
    """Raise a ModelError if the network cannot be measured: a recorded program, or weights that are not there yet."""
    for kind, is_kind in (("a TorchScript module", _is_script), ("a program of torch.export", _is_exported)):
        if any(map(is_kind, network.modules())):
            raise ModelError(f"{name} is {kind}, whose layers cannot be read. Pass the original nn.Module.")
    tensors = (*network.parameters(), *network.buffers())
    if any(is_lazy(tensor) for tensor in tensors):
        raise ModelError(f"{name} has lazy modules without weights. Call it once on a batch of images first.")
    if any(tensor.is_meta for tensor in tensors):
        raise ModelError(f"{name} is on the meta device and has no weights. Load them first.")


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_exported(module: nn.Module) -> bool:
    return isinstance(module, torch.fx.GraphModule) and "eval" in vars(module)  # it has one mode, and refuses others


def nearest_multiple(full: Size, share: float, multiple: Size) -> Size:
    """Return the size with sides nearest to `share` of the full ones among the multiples."""
    height, width = (
        min(side, max(1, math.floor(share * side / unit + 0.5)) * unit)
        for side, unit in zip(full, multiple, strict=True)
    )
    return height, width


def find_multiple(network: nn.Module, cell: int | Sequence[int] | None) -> Size:
    """Return what height and width must be multiples of: the network's patch, and the cells that CutMix mixes.

    Args:
        network: The bare network. Its patch is that of its `patch_embed`, as timm has it; without one it is 4 pixels.
        cell: The recipe's `data.augment.cutmix_cell`, which has targets of its own.

    Example:
        >>> import timm
        >>> vit, resnet = timm.create_model("vit_tiny_patch16_224"), timm.create_model("resnet18")
        >>> find_multiple(vit, None), find_multiple(resnet, None), find_multiple(resnet, 6)
        ((16, 16), (4, 4), (12, 12))
    """
    embed = getattr(network, "patch_embed", None)
    if callable(getattr(embed, "feat_ratio", None)):
        patch = embed.feat_ratio(as_scalar=False)  # type: ignore[union-attr]
    else:
        patch = getattr(embed, "patch_size", MULTIPLE)
    height, width = (math.lcm(*sides) for sides in zip(as_pair(patch), as_pair(cell or 1), strict=True))
    return height, width


def nearest_size(full: Size, share: float, network: nn.Module) -> Size:
    """Return the size nearest to `share` of the full one that the network's patches divide."""
    return nearest_multiple(full, share, find_multiple(getattr(network, "backbone", network), None))


def as_pair(sides: Any) -> Size:
    """Return height and width, which are equal if one number is given."""
    height, width = (sides, sides) if isinstance(sides, int) else sides
    return int(height), int(width)
