"""Squeeze-and-Excitation in place of Context Broadcasting, for the comparison of [hyeonwoo2023 Table 3].

Shapes: B images, N tokens (prefix tokens included; or a grid [B, H, W, D]), D channels, r the reduction.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import Part
from vitclinic.treatments.placing import LAYERS, PART, POSITION, Layers, Position, mean_over_tokens, place
from vitclinic.treatments.treatment import Treatment, register


def squeeze_and_excite(x_bnd: Tensor, squeeze_rd: Tensor, excite_dr: Tensor) -> Tensor:
    """Return the tokens gated by the mean over all tokens: x_i * sigmoid(W2 relu(W1 mean_j x_j))."""
    squeezed = torch.relu(F.linear(mean_over_tokens(x_bnd), squeeze_rd))
    return x_bnd * torch.sigmoid(F.linear(squeezed, excite_dr))


class SqueezeExcitation(Part):
    """SE(x_i) = x_i * sigmoid(W2 relu(W1 mean_j x_j)), W1 in R^(D/r x D), W2 in R^(D x D/r), without biases.

    This is Hu et al. 2018 (Eq. 2-4) with tokens instead of pixels; the mean is over all of them [hyeonwoo2023 Table 3].

    Args:
        width: Number of channels D.
        reduction: The ratio r of D to the gate's hidden width.

    Example:
        >>> SqueezeExcitation(width=32, reduction=16)(torch.ones(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(self, width: int, reduction: int = 16) -> None:
        super().__init__()
        squeezed = max(1, width // reduction)
        self.squeeze = nn.Linear(width, squeezed, bias=False)
        self.excite = nn.Linear(squeezed, width, bias=False)
        for layer in (self.squeeze, self.excite):
            nn.init.trunc_normal_(layer.weight, std=0.02)  # like the linear layers of a ViT

    def forward(self, x_bnd: Tensor) -> Tensor:
        return squeeze_and_excite(x_bnd, self.squeeze.weight, self.excite.weight)


@register
class SqueezeExcitationTreatment(Treatment):
    """Squeeze-and-Excitation at the end of the MLP: channels gated by the mean of all tokens [hyeonwoo2023 Table 3].

    Attributes:
        reduction: The ratio of the tokens' width to the gate's hidden width.
        position: Position in the block, as for `context_broadcasting`.
        layers: `upper`, `all` or a list of block numbers.
    """

    name: ClassVar[str] = "squeeze_excitation"
    paper: ClassVar[str] = "hyeonwoo2023 Table 3"
    changes: ClassVar[str] = "the channels are gated by a small MLP of the mean of all tokens, at the end of the MLP"
    costs: ClassVar[str] = "2 D^2 / r parameters, one mean and one product per block"
    part: ClassVar[str] = PART

    reduction: int = Field(16, ge=1, description="ratio of the tokens' width to the gate's hidden width")
    position: Position = Field("mlp_end", description=POSITION)
    layers: Layers = Field("upper", description=LAYERS)

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        place(self, network, self.position, self.layers, lambda width: SqueezeExcitation(width, self.reduction), spec)
        return network
