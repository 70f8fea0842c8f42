"""The network inside its wrappers, an image that it takes, and how it is called with images."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from vitclinic._core.errors import AnatomyError, first_line
from vitclinic.anatomy.families import Family, list_families
from vitclinic.anatomy.forward import eval_mode

_WRAPPED = ("_orig_mod", "module", "backbone", "model", "network", "net", "encoder")
"""Attributes in which torch.compile, DDP, and modules that only prepare images or outputs keep the network."""
IMAGES = "pixel_values"
"""The name that Hugging Face's networks have for images."""
_SIZES = (64, 224, 32, 96, 128, 256, 384, 28, 16, 8)
"""Image sizes to try with a network that does not say its own: small for those that take any, then the most common."""


def unwrap(network: nn.Module) -> tuple[nn.Module, Family | None]:
    """Return the network inside all wrappers, and its family, if there is one.

    A wrapper keeps the network in one of a few attributes, or in a Sequential, and has no parameters beside it: a
    backbone with a head behind it is a network of its own, unless it says that it is one with a task's head
    (`is_headed`).
    """
    core = network
    while True:
        for family in list_families():
            if family.includes(core):
                return core, family
        inside = _inside(core)
        if inside is None:
            return core, None
        core = inside


def unwrap_parallel(network: nn.Module) -> nn.Module:
    """Return the module to call in this process alone, without the wrappers that divide a batch among several."""
    while isinstance(network, DistributedDataParallel | DataParallel):
        network = network.module
    return network


def _inside(module: nn.Module) -> nn.Module | None:
    """Return the child that `module` only wraps, or None."""
    children = dict(module.named_children())
    if getattr(module, "is_headed", False):
        return children["backbone"]
    parameters = set(module.parameters())
    names = children if isinstance(module, nn.Sequential) else [name for name in _WRAPPED if name in children]
    inside = [children[name] for name in names if parameters and parameters == set(children[name].parameters())]
    # In a Sequential of layers, of which one alone has parameters, that layer is not a network.
    return next((child for child in inside if any(True for _ in child.children())), None)


def image_keyword(network: nn.Module) -> str | None:
    """Return the keyword that a network takes its images by; None if they are its first argument.

    That is `pixel_values` if `forward` has it behind other arguments, else the only required keyword of a `forward`
    without positional arguments.

    Example:
        >>> class Encoder(nn.Module):
        ...     def forward(self, *, pixel_values, output_attentions=False): ...
        >>> image_keyword(Encoder()), image_keyword(nn.Flatten())
        ('pixel_values', None)
    """
    inside = unwrap_parallel(getattr(network, "_orig_mod", network))  # they hand on whatever they are called with
    try:
        parameters = list(inspect.signature(inside.forward).parameters.values())
    except (TypeError, ValueError):  # a forward without a Python signature
        return None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if positional and positional[0].name == IMAGES:
        return None
    if any(each.name == IMAGES for each in parameters):
        return IMAGES
    if positional or any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return None
    required = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY and each.default is each.empty]
    return required[0] if len(required) == 1 else None


def call_with_images(network: nn.Module, images: Tensor) -> Any:
    """Return what a network returns for images [B, C, H, W].

    Example:
        >>> import torch
        >>> call_with_images(nn.Flatten(), torch.zeros(2, 3, 4, 4)).shape
        torch.Size([2, 48])
    """
    keyword = image_keyword(network)
    return network(images) if keyword is None else network(**{keyword: images})


def check_weights(network: nn.Module) -> None:
    """Raise an AnatomyError if a network has no weights yet, or none of its code."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise AnatomyError("the network is a TorchScript module, whose layers cannot be read; pass the nn.Module.")
    if any(parameter.is_meta for parameter in network.parameters()):
        raise AnatomyError("the network is on the meta device and has no weights; load them first.")


def weight_like(network: nn.Module) -> Tensor:
    """Return a weight whose type and device images must have."""
    tensors = (*network.parameters(), *network.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def find_example(network: nn.Module, family: Family | None) -> Tensor:
    """Return noise of a size that a network takes: its family's, the one it states, or the first that works.

    Raises:
        AnatomyError: The network takes none of the usual sizes.
    """
    generator = torch.Generator().manual_seed(0)
    if family is not None and family.input_size is not None:
        try:
            return torch.randn(1, *family.input_size(network), generator=generator)
        except (AttributeError, LookupError, TypeError, StopIteration):
            if not family.built_in:
                raise
    channels = next((m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d)), 3)
    sizes = [*_stated_sizes(network), *((channels, side, side) for side in _SIZES)]
    like, error = weight_like(network), None
    for size in sizes:
        example = torch.randn(1, *size, generator=generator)
        try:
            with torch.no_grad(), eval_mode(network):
                call_with_images(network, example.to(like))
            return example
        except Exception as failure:  # noqa: BLE001 the user's own code may raise anything
            error = error or failure
    raise AnatomyError(
        f"{type(network).__name__} takes images of none of the usual sizes ({first_line(error)}); pass an example of "
        "yours: Anatomy.of(network, example=images)."
    )


def _stated_sizes(network: Any) -> list[tuple[int, int, int]]:
    """Return the size of images that a network of timm or Hugging Face states."""
    published = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
    if isinstance(published, dict) and published.get("input_size"):
        return [tuple(published["input_size"])]
    config = getattr(network, "config", None)
    size = getattr(config, "image_size", None)
    if size is None:
        return []
    height, width = (size, size) if isinstance(size, int) else size
    return [(getattr(config, "num_channels", 3), height, width)]
