"""Widening a ViT: every layer at a larger width, old values kept where they were.

New entries are drawn as those beside them are distributed: normal, with the mean and the standard deviation of the old
tensor. So a network that is not trained yet is what its library would have made at that width, whatever the rule that
it starts by (a norm's scale of 1 goes on as 1, a bias of 0 as 0, a weight of deviation 0.02 with 0.02).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy import Anatomy
from vitclinic.errors import TreatmentError


def grown(old: Tensor, shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """A tensor of `shape` that begins with `old` on every axis; the rest is drawn like `like` (by default, like `old`).

    >>> grown(torch.ones(2), (3,))
    tensor([1., 1., 1.])
    """
    like = old.detach() if like is None else like.detach()
    new = torch.empty(*shape, dtype=old.dtype, device=old.device)
    new.normal_(like.mean().item(), like.std(correction=0).item())
    new[tuple(slice(length) for length in old.shape)] = old.detach()
    return new


def grown_linear(like: nn.Linear, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> nn.Linear:
    """A linear layer of a weight of `shape` that begins with `weight` and `bias`, drawn like the layer `like`."""
    layer = nn.Linear(shape[1], shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(grown(weight, shape, like.weight), like.weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(grown(bias, shape[:1], like.bias), like.bias.requires_grad)
    return layer


def check_widening(anatomy: Anatomy, name: str) -> None:
    """Raise where `widen` could not widen all of the network."""
    network = anatomy.network
    if anatomy.family != "timm ViT":
        raise TreatmentError(f"{name} does not fit a {anatomy.family} at a larger width; use a timm ViT.")
    for unit in anatomy.of_kind("mlp"):
        linears = [module for module in unit.module.modules() if isinstance(module, nn.Linear)]
        if len(linears) != 2 or linears[0].out_features != linears[1].in_features:
            raise TreatmentError(f"{name} cannot make {unit.name} wider: it is not an MLP of two linear layers.")
    for path, module in network.named_modules():
        own = list(module.parameters(recurse=False))
        known = module is network or isinstance(module, nn.Linear | nn.Conv2d)
        if not known and any(parameter.ndim > 1 for parameter in own):
            raise TreatmentError(f"{name} cannot make {path} wider: it is a {type(module).__name__}.")


def widen(anatomy: Anatomy, by: int, attentions: Sequence[nn.Module]) -> None:
    """Make every layer but the attention of a timm ViT wider by `by`; MLPs keep their ratio.

    The `attentions` are their owner's to widen. Of a stem only its last convolution, which leads to the network's
    width, and the norms behind it are changed.
    """
    network: Any = anatomy.network
    width = network.embed_dim
    widths = {width: width + by}
    for unit in anatomy.of_kind("mlp"):
        hidden = next(module.out_features for module in unit.module.modules() if isinstance(module, nn.Linear))
        widths.setdefault(hidden, hidden * (width + by) // width)
    _widen_tokens(network, by)
    stem = list(network.patch_embed.modules())
    projection = max(place for place, module in enumerate(stem) if isinstance(module, nn.Conv2d))
    as_they_are = {id(part) for attention in attentions for part in attention.modules()}
    as_they_are |= {id(part) for part in stem[:projection]}
    classifiers = (network.head, getattr(network, "head_dist", None))
    for module in network.modules():
        if module is network or id(module) in as_they_are:
            continue
        if isinstance(module, nn.Conv2d):
            _widen_layer(module, (width + by, *module.weight.shape[1:]))
        elif isinstance(module, nn.Linear):
            into, out = (widths.get(length, length) for length in (module.in_features, module.out_features))
            _widen_layer(module, (module.out_features if module in classifiers else out, into))
        else:
            _widen_vectors(module, widths)
    for attribute in ("embed_dim", "num_features", "head_hidden_size"):
        setattr(network, attribute, width + by)


def _widen_tokens(network: nn.Module, by: int) -> None:
    """Class, distillation and register tokens and the position embedding."""
    for name, old in list(network.named_parameters(recurse=False)):
        setattr(network, name, nn.Parameter(grown(old, (*old.shape[:-1], old.shape[-1] + by)), old.requires_grad))


def _widen_layer(layer: Any, shape: tuple[int, ...]) -> None:
    """The weight of a linear layer or a convolution, and its bias."""
    layer.weight = nn.Parameter(grown(layer.weight, shape), layer.weight.requires_grad)
    if layer.bias is not None:
        layer.bias = nn.Parameter(grown(layer.bias, shape[:1]), layer.bias.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = shape
    else:
        layer.out_channels = shape[0]


def _widen_vectors(module: Any, widths: dict[int, int]) -> None:
    """Norms, layer scales and whatever else has one value per channel."""
    for name, old in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(grown(old, (widths.get(len(old), len(old)),)), old.requires_grad))
    if isinstance(module, nn.BatchNorm2d):
        module.num_features = widths[module.num_features]
        for name in ("running_mean", "running_var"):  # by their mean: a variance that is drawn might be negative
            old = getattr(module, name)
            setattr(module, name, grown(old, (module.num_features,), old.mean()))
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:
        module.normalized_shape = tuple(widths.get(length, length) for length in shape)
