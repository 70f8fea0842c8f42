"""Ablations of a transformer's feed-forward layers [wang2022, Table 5].

Shapes: B images, N tokens (along one axis or two), D channels; x_bnd is [B, N, D] or [B, h, w, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, cast

from pydantic import Field
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Unit
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import run_under
from vitclinic.treatments.parts import block_module, examine, layers_in, missing, own_module, own_modules
from vitclinic.treatments.relu_activation import GeluToRelu, find_gelu_callers, is_gelu
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
    """The parts of a plain MLP: linear, activation, linear; a GELU that is a function has no module, but a caller."""

    first: nn.Linear
    act: nn.Module | None
    second: nn.Linear
    caller: nn.Module | None = None


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
    part: ClassVar[str] = "MLPs over channels, each of a linear layer, an activation and a linear layer"

    variant: Literal["no_norm", "relu", "conv_bn_gelu", "conv_gelu"] = Field(
        "conv_bn_gelu", description="which row of Table 5"
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        units = anatomy.of_kind("mlp")
        if not units:
            raise missing(self, network)
        if self.variant == "no_norm":
            replaced: dict[nn.Module, nn.Module] = {_norm(unit): nn.Identity() for unit in units}
        else:
            mlps = self._find_mlps(anatomy, units, spec)
            self._check_activations(network, list(mlps.values()))
            replaced = {old: new for name, mlp in mlps.items() for old, new in self._rewrite(name, mlp).items()}
            for caller in {mlp.caller for mlp in mlps.values() if mlp.caller and self.variant == "relu"}:
                run_under(GeluToRelu, caller)
        paths = {anatomy.path(old): new for old, new in replaced.items()}
        for path, new in paths.items():
            network.set_submodule(path, new)
        return network

    def _find_mlps(self, anatomy: Anatomy, units: Sequence[Unit], spec: ImageSpec) -> dict[str, _Parts]:
        """Return the parts of every MLP, by the name of its unit."""
        ran = layers_in(anatomy, units, spec)
        callers = set(find_gelu_callers(anatomy.network, spec))
        found: dict[str, _Parts] = {}
        for unit in units:
            home = own_module(anatomy, unit) or block_module(anatomy, unit)
            parts = _parts(ran[unit.name], callers.intersection(own_modules(home)))
            if parts is None:
                kind = type(home).__name__
                why = f"{unit.name} is part of a {kind}" if unit.module is None else f"{unit.name} is a {kind}"
                raise missing(self, anatomy.network, f"{why} of another kind (gated, functional or already rewritten)")
            found[unit.name] = parts
        return found

    def _check_activations(self, network: nn.Module, mlps: Sequence[_Parts]) -> None:
        if self.variant == "relu":
            if all(isinstance(mlp.act, nn.ReLU) for mlp in mlps):
                raise TreatmentError(
                    "ffn_variant relu has nothing to change: every MLP of this network has ReLU already."
                )
        elif "relu_activation" in treatments_of(network):
            raise TreatmentError(
                f"ffn_variant {self.variant} uses GELU: list ffn_variant before relu_activation, whose ReLUs it would"
                " undo."
            )

    def _rewrite(self, name: str, mlp: _Parts) -> dict[nn.Module, nn.Module]:
        if self.variant == "relu":
            return {} if mlp.act is None else {mlp.act: nn.ReLU()}
        for layer in (mlp.first, mlp.second):
            check_untouched(self.name, layer, f"the layers of {name}")
        first = PointwiseConv(mlp.first, norm=self.variant == "conv_bn_gelu")
        layers: dict[nn.Module, nn.Module] = {mlp.first: first, mlp.second: PointwiseConv(mlp.second, norm=False)}
        return layers if mlp.act is None or is_gelu(mlp.act) else {**layers, mlp.act: nn.GELU()}


def _parts(ran: Sequence[nn.Module], callers: set[nn.Module]) -> _Parts | None:
    """Return the two linear layers among those that ran, and the activation between them; None for another MLP."""
    linear = [place for place, layer in enumerate(ran) if isinstance(layer, nn.Linear)]
    if len(linear) != 2:
        return None
    first, second = (cast(nn.Linear, ran[place]) for place in linear)
    between = [layer for layer in ran[linear[0] + 1 : linear[1]] if not _keeps_values(layer)]
    if first.out_features != second.in_features or len(between) > 1:
        return None
    if not between:
        return _Parts(first, None, second, callers.pop()) if len(callers) == 1 else None
    return None if list(between[0].parameters()) else _Parts(first, between[0], second)


def _keeps_values(layer: nn.Module) -> bool:
    """Return True for a dropout or an identity."""
    return isinstance(layer, nn.Identity | nn.modules.dropout._DropoutNd)


def _norm(unit: Unit) -> nn.Module:
    if unit.norm is None or isinstance(unit.norm, nn.Identity):
        raise TreatmentError(f"ffn_variant: {unit.name} has no norm to remove.")
    return unit.norm
