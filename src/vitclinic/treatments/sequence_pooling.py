"""Sequence pooling: the classifier reads a learned weighted mean of the patches (Hassani et al. 2021).

Shapes: B images, N tokens, D channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitclinic.anatomy import Site, Unit, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments.gap_head import check_pooled_once, find_class_token, pool_in_timm
from vitclinic.treatments.parts import examine, replace_at, run_once
from vitclinic.treatments.treatment import Treatment, register


def pool_sequence(x_bnd: Tensor, weight_d: Tensor) -> Tensor:
    """Return sum_i w_i x_i, [B, D], with w = softmax over the tokens of x_i . g."""
    return (_weights(x_bnd, weight_d).unsqueeze(1) @ x_bnd).squeeze(1)


def _weights(x_bnd: Tensor, weight_d: Tensor) -> Tensor:
    return (x_bnd @ weight_d).softmax(dim=1).to(x_bnd.dtype)


class SequencePool(nn.Module):
    """Sequence pooling: z = sum_i w_i x_i, w = softmax(x g) over the tokens (Hassani et al. 2021, SeqPool).

    g starts at zero, so that z starts as the mean. It has no bias, which the softmax would not see.

    Args:
        width: Number of channels D.

    Example:
        >>> SequencePool(2)(torch.tensor([[[0.0, 1.0], [2.0, 5.0]]])).tolist()
        [[1.0, 3.0]]
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}"

    def forward(self, x_bnd: Tensor) -> Tensor:
        """Return the weighted mean of the tokens, [B, D]."""
        return pool_sequence(x_bnd, self.weight)

    def weigh(self, x: Tensor) -> Tensor:
        """Return the tokens [B, N, D], or a grid [B, H, W, D], times N w_i, so that their mean is the weighted one."""
        x_bnd = x.flatten(1, -2)
        weights_bn1 = _weights(x_bnd, self.weight).unsqueeze(-1)
        return (x_bnd * (x_bnd.shape[1] * weights_bn1)).view_as(x)


@register
class SequencePooling(Treatment):
    """Sequence pooling: logits = head(norm(sum_i w_i x_i)), w = softmax(x g), no class token (Hassani et al. 2021)."""

    name: ClassVar[str] = "sequence_pooling"
    paper: ClassVar[str] = "hassani2021 (CCT), SeqPool"
    changes: ClassVar[str] = "the classifier reads a learned weighted mean of the patches; a class token is removed"
    costs: ClassVar[str] = "D parameters, and with a class token 2 D and one token less; no more time"
    part: ClassVar[str] = "a classifier that reads a class token among the patches, or the mean of the patches"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        check_pooled_once(network)
        like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
        if isinstance(network, VisionTransformer):
            pooled = pool_in_timm(self, network)
            # timm's place for a pooling that learns: it gets the patches, and leads to fc_norm and head.
            pooled.attn_pool = SequencePool(network.embed_dim).to(like).train(network.training)
            return pooled
        (head,) = examine(self, network, spec).of_kind("head")
        read = _find_mean(head, network, spec) or find_class_token(self, head, network, spec)
        pool = SequencePool(_tokens_at(read.place, network, spec).shape[-1]).to(like).train(network.training)
        network.add_module(self.name, pool)
        read.replace(pool)
        return network


class _Mean(NamedTuple):
    """The patches whose mean a classifier reads: where they pass, and how many tokens come before them."""

    place: Site
    prefix: int

    def replace(self, pool: SequencePool) -> None:
        """Let the classifier read their weighted mean."""
        replace_at(self.place, _Weighed(self.prefix, pool).apply)


class _Weighed:
    """The patches of a state, weighed so that their mean is the weighted one."""

    def __init__(self, prefix: int, pool: SequencePool) -> None:
        self._prefix, self._pool = prefix, pool

    def apply(self, x: Tensor) -> Tensor:
        patches = self._pool.weigh(x[:, self._prefix :])
        return torch.cat((x[:, : self._prefix], patches), dim=1) if self._prefix else patches


def _find_mean(head: Unit, network: nn.Module, spec: ImageSpec) -> _Mean | None:
    """Return the patches of the last state, before or behind the final norm, if the classifier reads their mean.

    Any patches give the classifier what their mean gives it, in every place; zeros give it something else.
    """
    if not head.input.layout.spatial:  # a class token alone
        return None
    normed = [] if head.norm is None else [replace(head.input, module=head.norm, end="out", item=0, within=None)]
    for place in (head.input, *normed):
        tokens = _tokens_at(place, network, spec)
        layout = place.layout
        if len(tokens) != 2 or not (tokens.ndim == 3 or (tokens.ndim == 4 and layout.channels_last)):
            continue
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens) * 1000
        patches = noise[:, layout.prefix :]
        level = patches.flatten(1, -2).mean(dim=1).view(2, *[1] * (tokens.ndim - 2), -1).expand_as(patches)
        same = torch.cat((noise[:, : layout.prefix], level), dim=1)
        zero = torch.cat((noise[:, : layout.prefix], torch.zeros_like(patches)), dim=1)
        read, mean, nothing = (_classified(place, state, network, spec) for state in (noise, same, zero))
        near = max(1e-3, 4 * torch.finfo(tokens.dtype).eps) * (read - nothing).abs().max()
        if near > 0 and (read - mean).abs().max() < near:
            return _Mean(place, layout.prefix)
    return None


def _tokens_at(place: Site, network: nn.Module, spec: ImageSpec) -> Tensor:
    with taps({"tokens": replace(place, overwritten=True)}) as seen:
        run_once(network, spec, batch=2)
    return seen["tokens"]


def _classified(place: Site, state: Tensor, network: nn.Module, spec: ImageSpec) -> Tensor:
    """Return what enters the last linear layer if `state` passes a place.

    What leaves it may be the same for all states: classifiers start at zero in some libraries.
    """
    entered: list[Tensor] = []
    handles = [*replace_at(place, lambda _: state)]
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            handles.append(layer.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach())))
    try:
        run_once(network, spec, batch=2)
    finally:
        for handle in handles:
            handle.remove()
    return entered[-1].float() if entered else torch.zeros(1)
