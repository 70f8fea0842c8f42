"""Context Broadcasting: add the mean of all tokens to every token, which is uniform attention for free.

Shapes: B images, N tokens (prefix tokens included; or a grid [B, H, W, D]), D channels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitclinic.data import ImageSpec
from vitclinic.models.tokens import passing_tokens
from vitclinic.treatments.parts import Part
from vitclinic.treatments.placing import LAYERS, PART, POSITION, Layers, Position, mean_over_tokens, place
from vitclinic.treatments.treatment import Treatment, register

Tokens = Literal["all", "image", "text"]


def broadcast_context(x_bnd: Tensor, scale_d: Tensor | None = None) -> Tensor:
    """Return CB(x_i) = (x_i + mean_j x_j) / 2, or with a scale CB_S(x_i) = x_i + Lambda * mean_j x_j."""
    if scale_d is None:
        return (x_bnd + mean_over_tokens(x_bnd)).mul_(0.5)  # in place: nothing else holds the sum
    # Under autocast the scale has a wider dtype than the tokens, which must keep theirs.
    return x_bnd + (scale_d * mean_over_tokens(x_bnd)).to(x_bnd.dtype)


def broadcast_among(x_bnd: Tensor, taking_bn: Tensor, scale_d: Tensor | None = None) -> Tensor:
    """Return CB, or with a scale CB_S, among some of the tokens [B, N]; the others stay as they are."""
    taking_bn1 = taking_bn[:, :, None].to(x_bnd.dtype)
    mean_b1d = (x_bnd * taking_bn1).sum(1, keepdim=True) / taking_bn1.sum(1, keepdim=True).clamp_min(1)
    if scale_d is None:
        return torch.lerp(x_bnd, mean_b1d.expand_as(x_bnd), 0.5 * taking_bn1)
    return x_bnd + (scale_d * mean_b1d * taking_bn1).to(x_bnd.dtype)


class _Broadcasting(Part):
    """Base of CB and CB_S: which tokens take part."""

    tokens: Tokens = "all"

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        if tokens != "all":  # at its default it is no part of what a network's digest is made of
            self.tokens = tokens

    def _broadcast(self, x_bnd: Tensor, scale_d: Tensor | None = None) -> Tensor:
        passing = passing_tokens()
        if passing is not None:
            return broadcast_among(x_bnd, passing.of(self.tokens), scale_d)
        return x_bnd if self.tokens == "text" else broadcast_context(x_bnd, scale_d)


class ContextBroadcasting(_Broadcasting):
    """CB(x_i) = (x_i + mean_j x_j) / 2 over all tokens, without parameters [hyeonwoo2023 Eq. 1].

    Args:
        tokens: The kind of tokens that take part, in a network that also reads words.

    Example:
        >>> ContextBroadcasting()(torch.tensor([[[0.0], [4.0]]])).flatten().tolist()
        [1.0, 3.0]
    """

    def __init__(self, tokens: Tokens = "all") -> None:
        super().__init__(tokens)

    def forward(self, x_bnd: Tensor) -> Tensor:
        return self._broadcast(x_bnd)


class ScaledContextBroadcasting(_Broadcasting):
    """CB_S(x_i) = x_i + Lambda * mean_j x_j with a learned Lambda in R^D [hyeonwoo2023 Sec. 3.2].

    Args:
        width: Number of channels D.
        value: Initial value of Lambda.
        tokens: The kind of tokens that take part, in a network that also reads words.

    Example:
        >>> ScaledContextBroadcasting(1, 0.5)(torch.tensor([[[0.0], [4.0]]])).flatten().tolist()
        [1.0, 5.0]
    """

    def __init__(self, width: int, value: float = 0.0, tokens: Tokens = "all") -> None:
        super().__init__(tokens)
        self.scale = nn.Parameter(torch.full((width,), value))

    @property
    def context_scale(self) -> Tensor:
        """Lambda, under the name that the probe `cb_scale` looks for."""
        return self.scale

    def forward(self, x_bnd: Tensor) -> Tensor:
        return self._broadcast(x_bnd, self.scale)


@register
class ContextBroadcastingTreatment(Treatment):
    """Context Broadcasting at the end of the MLP: CB, or with `scaled` CB_S [hyeonwoo2023 Eq. 1, Sec. 3.2].

    Attributes:
        scaled: Use CB_S, with one learned scale per channel.
        position: Position in the block: `mlp_end`, `mlp_mid`, `mlp_front`, `msa_end` or `both`.
        layers: `upper`, `all` or a list of block numbers; by default `upper` for CB and `all` for CB_S.
        initial_scale: Initial value of CB_S's scales.
        tokens: `all`, or the kind of tokens that take part under the task vqa: `image` or `text`. Words that only fill
            a question up never do.
    """

    name: ClassVar[str] = "context_broadcasting"
    paper: ClassVar[str] = "hyeonwoo2023 Eq. 1, Sec. 3.2-3.3, 4.1"
    changes: ClassVar[str] = "every token gets the mean of all tokens (CB; with `scaled`, CB_S) at the end of the MLP"
    costs: ClassVar[str] = "one mean and one addition per block; CB no parameters, CB_S the width per block"
    part: ClassVar[str] = PART

    scaled: bool = Field(False, description="CB_S, with a learned scale per channel, instead of CB")
    position: Position = Field("mlp_end", description=POSITION)
    layers: Layers | None = Field(None, description=f"{LAYERS}; by default upper for CB and all for CB_S")
    initial_scale: float = Field(0.0, description="the value at which the scales of CB_S start")
    tokens: Tokens = Field("all", description="which tokens take part: all, or (task vqa) image or text")

    @model_validator(mode="after")
    def _check_unused_options(self) -> ContextBroadcastingTreatment:
        if self.initial_scale != 0 and not self.scaled:
            raise ValueError("initial_scale is only for CB_S; add scaled: true")
        return self

    def fitting_tasks(self) -> tuple[str, ...] | None:
        return super().fitting_tasks() if self.tokens == "all" else ("vqa",)

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        layers = self.layers or ("all" if self.scaled else "upper")
        place(self, network, self.position, layers, self._part, spec)
        return network

    def _part(self, width: int) -> nn.Module:
        if self.scaled:
            return ScaledContextBroadcasting(width, self.initial_scale, self.tokens)
        return ContextBroadcasting(self.tokens)
