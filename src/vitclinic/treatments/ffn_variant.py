"""Ablations of a transformer's feed-forward layers [wang2022, Table 5].

Shapes: B images, N tokens (along one axis or two), D channels; x_bnd is [B, N, D] or [B, h, w, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Unit
from vitclinic.data import ImageSpec
from vitclinic.treatments.placing import own_modules
from vitclinic.treatments.relu_activation import is_gelu
from vitclinic.treatments.surgery import check_untouched, treatments_of
from vitclinic.treatments.treatment import Treatment, register


class PointwiseConv(nn.Module):
    """A linear layer as a Conv1D over tokens with kernel 1 ("Conv1D equals to fc"), optionally with BatchNorm.

    It starts from the weights of the given layer; without BatchNorm it computes the same.

    Args:
        layer: The linear layer to convert.
        norm: Add BatchNorm after the convolution.

    Example:
        >>> import torch
        >>> layer, x_bnd = nn.Linear(4, 6), torch.randn(2, 5, 4)
        >>> torch.allclose(PointwiseConv(layer, norm=False)(x_bnd), layer(x_bnd), atol=1e-6)
        True
    """

    def __init__(self, layer: nn.Linear, *, norm: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = layer.bias is not None and not norm  # BatchNorm would subtract it
        self.conv = nn.Conv1d(layer.in_features, layer.out_features, 1, bias=bias).to(layer.weight)
        self.conv.weight.data.copy_(layer.weight.data.unsqueeze(-1))
        if self.conv.bias is not None:
            self.conv.bias.data.copy_(layer.bias.data)
        for parameter in self.conv.parameters():
            parameter.requires_grad_(layer.weight.requires_grad)
        self.norm = nn.BatchNorm1d(layer.out_features).to(layer.weight) if norm else nn.Identity()
        self.train(layer.training)

    def forward(self, x_bnd: Tensor) -> Tensor:
        """Return [B, N, out_features], or the same on a grid; BatchNorm's statistics are over images and tokens."""
        y_bdn = self.norm(self.conv(x_bnd.flatten(1, -2).transpose(1, 2)))
        return y_bdn.transpose(1, 2).reshape(*x_bnd.shape[:-1], self.out_features)  # type: ignore[no-any-return]


class _Parts(NamedTuple):
    """The parts of a plain MLP: linear, activation, linear."""

    first: nn.Linear
    act: nn.Module
    second: nn.Linear


@register
class FFNVariant(Treatment):
    """One of the changes of [wang2022, Table 5], applied to every MLP of the network.

    Attributes:
        variant: `no_norm`, `relu`, `conv_bn_gelu` or `conv_gelu`.
    """

    name: ClassVar[str] = "ffn_variant"
    paper: ClassVar[str] = "wang2022, Table 5"
    changes: ClassVar[str] = (
        "every MLP: its LayerNorm removed, GELU as ReLU, or linear layers as Conv1D with or without BatchNorm"
    )
    costs: ClassVar[str] = "parameters of a block of width D, ratio r: no_norm -2D, conv_bn_gelu +rD, others none"
    families: ClassVar[tuple[str, ...] | None] = (
        "timm ViT",
        "timm PiT",
        "timm Swin",
        "timm Swin V2",
        "timm MLP-Mixer",
        "timm VOLO",
        "torchvision ViT",
        "torchvision Swin",
    )

    variant: Literal["no_norm", "relu", "conv_bn_gelu", "conv_gelu"] = Field(
        "conv_bn_gelu", description="which row of Table 5"
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = Anatomy.of(network)
        units = anatomy.of_kind("mlp")
        if not units:
            raise TreatmentError(f"ffn_variant: this {anatomy.family} has no MLP over channels to change.")
        if self.variant == "no_norm":
            replaced: dict[nn.Module, nn.Module] = {_norm(unit): nn.Identity() for unit in units}
        else:
            self._check_activations(network, units)
            replaced = {old: new for unit in units for old, new in self._rewrite(unit).items()}
        paths = {anatomy.path(old): new for old, new in replaced.items()}
        for path, new in paths.items():
            network.set_submodule(path, new)
        return network

    def _check_activations(self, network: nn.Module, units: Sequence[Unit]) -> None:
        if self.variant == "relu":
            if all(isinstance(_parts(unit).act, nn.ReLU) for unit in units):
                raise TreatmentError(
                    "ffn_variant relu has nothing to change: every MLP of this network has ReLU already."
                )
        elif "relu_activation" in treatments_of(network):
            raise TreatmentError(
                f"ffn_variant {self.variant} uses GELU: list ffn_variant before relu_activation, whose ReLUs it would"
                " undo."
            )

    def _rewrite(self, unit: Unit) -> dict[nn.Module, nn.Module]:
        mlp = _parts(unit)
        if self.variant == "relu":
            return {mlp.act: nn.ReLU()}
        for layer in (mlp.first, mlp.second):
            check_untouched(self.name, layer, f"the layers of {unit.name}")
        first = PointwiseConv(mlp.first, norm=self.variant == "conv_bn_gelu")
        layers: dict[nn.Module, nn.Module] = {mlp.first: first, mlp.second: PointwiseConv(mlp.second, norm=False)}
        return layers if is_gelu(mlp.act) else {**layers, mlp.act: nn.GELU()}


def _norm(unit: Unit) -> nn.Module:
    if unit.norm is None or isinstance(unit.norm, nn.Identity):
        raise TreatmentError(f"ffn_variant: {unit.name} has no norm to remove.")
    return unit.norm


def _parts(unit: Unit) -> _Parts:
    """Return the two linear layers of an MLP and the activation, which is the module right after the first."""
    parts = own_modules(unit.module)
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    if len(linear) == 2 and linear[0].out_features == linear[1].in_features:
        act = parts[parts.index(linear[0]) + 1]
        if act is not linear[1] and not list(act.parameters()):
            return _Parts(linear[0], act, linear[1])
    raise TreatmentError(
        f"ffn_variant rewrites MLPs of linear layer, activation, linear layer; {unit.name} is a"
        f" {type(unit.module).__name__} of another kind (gated, or already rewritten)."
    )
