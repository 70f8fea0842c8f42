"""Uniform attention as a head, and the widening of a ViT that one more head needs.

Widening keeps old values where they were. New entries are drawn from a normal distribution with the mean and standard
deviation of the old tensor, so an untrained network is distributed as its library would have built it at that width,
whatever its initialisation (a norm's scale stays 1, a bias 0, a weight of deviation 0.02 keeps 0.02).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Unit
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import edit_attention, is_edited
from vitclinic.treatments.neighbourhood import seams_of
from vitclinic.treatments.parts import check_differentiable, examine, find_attentions, missing
from vitclinic.treatments.surgery import check_untouched
from vitclinic.treatments.treatment import Treatment, register


def grow(old: Tensor, shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Enlarge a tensor to `shape`: it begins with `old` on every axis, the rest is drawn like `like` (default `old`).

    Example:
        >>> grow(torch.ones(2), (3,))
        tensor([1., 1., 1.])
    """
    like = old.detach() if like is None else like.detach()
    new = torch.empty(*shape, dtype=old.dtype, device=old.device)
    new.normal_(like.mean().item(), like.std(correction=0).item())
    new[tuple(slice(length) for length in old.shape)] = old.detach()
    return new


def grow_linear(like: nn.Linear, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> nn.Linear:
    """Build a linear layer with a weight of `shape` that begins with `weight` and `bias`, the rest like `like`."""
    layer = nn.Linear(shape[1], shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(grow(weight, shape, like.weight), like.weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(grow(bias, shape[:1], like.bias), like.bias.requires_grad)
    return layer


def check_widening(anatomy: Anatomy, name: str) -> None:
    """Raise a TreatmentError if `widen` cannot widen every layer of the network."""
    network = anatomy.network
    if not isinstance(network, VisionTransformer):
        kind = type(network).__name__
        raise TreatmentError(f"{name} does not fit {kind} at a larger width; use timm's VisionTransformer.")
    for unit in anatomy.of_kind("mlp"):
        linears = _linears(unit)
        if len(linears) != 2 or linears[0].out_features != linears[1].in_features:
            raise TreatmentError(f"{name} cannot make {unit.name} wider: it is not an MLP of two linear layers.")
    for path, module in network.named_modules():
        own = list(module.parameters(recurse=False))
        known = module is network or isinstance(module, nn.Linear | nn.Conv2d)
        if not known and any(parameter.ndim > 1 for parameter in own):
            raise TreatmentError(f"{name} cannot make {path} wider: it is a {type(module).__name__}.")


def _linears(unit: Unit) -> list[nn.Linear]:
    inside = [] if unit.module is None else unit.module.modules()
    return [module for module in inside if isinstance(module, nn.Linear)]


def widen(anatomy: Anatomy, by: int, attentions: Sequence[nn.Module]) -> None:
    """Widen every layer of a timm ViT by `by`, except for `attentions`, which the caller widens; MLPs keep their ratio.

    In a stem only the last convolution, which projects to the network's width, and the norms after it change.
    """
    network: Any = anatomy.network
    width = network.embed_dim
    widths = {width: width + by}
    for unit in anatomy.of_kind("mlp"):
        hidden = _linears(unit)[0].out_features
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
    """Widen class, distillation and register tokens and the position embedding."""
    for name, old in list(network.named_parameters(recurse=False)):
        setattr(network, name, nn.Parameter(grow(old, (*old.shape[:-1], old.shape[-1] + by)), old.requires_grad))


def _widen_layer(layer: Any, shape: tuple[int, ...]) -> None:
    """Widen weight and bias of a linear layer or a convolution."""
    layer.weight = nn.Parameter(grow(layer.weight, shape), layer.weight.requires_grad)
    if layer.bias is not None:
        layer.bias = nn.Parameter(grow(layer.bias, shape[:1]), layer.bias.requires_grad)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = shape
    else:
        layer.out_channels = shape[0]


def _widen_vectors(module: Any, widths: dict[int, int]) -> None:
    """Widen norms, layer scales and everything else with one value per channel."""
    for name, old in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(grow(old, (widths.get(len(old), len(old)),)), old.requires_grad))
    if isinstance(module, nn.BatchNorm2d):
        module.num_features = widths[module.num_features]
        for name in ("running_mean", "running_var"):  # filled with the mean: a drawn variance could be negative
            old = getattr(module, name)
            setattr(module, name, grow(old, (module.num_features,), old.mean()))
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:
        module.normalized_shape = tuple(widths.get(length, length) for length in shape)


Variant = Literal["replace", "adjust", "append"]
"""The paper's names for (A), (B) and (C)."""


def attend_uniformly(x_bnd: Tensor, values: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the output of uniform attention: the mean over all tokens for each token, projected by `values`."""
    mean_b1d = x_bnd.mean(dim=1, keepdim=True)
    return (mean_b1d if values is None else values(mean_b1d)).expand(-1, x_bnd.shape[1], -1)


class UniformHeadAttention(nn.Module):
    """Multi-head self-attention whose last head returns the mean value over all tokens [hyeonwoo2023 Sec. 3.3].

        out_i = W_proj [head_1(x)_i, ..., head_h(x)_i, mean_j (W_value x_j)]

    Built from a timm attention and its weights: the first `learned` heads stay; if one is left over, its values become
    the uniform head's. The mean is taken before the projection to values, which gives the same result at 1/N of the
    cost. Attention dropout acts on the learned heads only. New entries are drawn by `grow`.

    Args:
        attention: The timm attention to convert.
        learned: Number of learned heads.
        uniform_width: Width of the uniform head.
        width: Width of the network.
    """

    uniform_heads = 1
    """Number of heads after the learned ones in a recorded map (`vitclinic.anatomy.record_attention`)."""

    def __init__(self, attention: Any, learned: int, uniform_width: int, width: int) -> None:
        super().__init__()
        self.learned_heads, self.head_dim = learned, attention.head_dim
        self.fused_attn = attention.fused_attn
        heads = (3, attention.num_heads, attention.head_dim)

        def rows(old: Tensor) -> tuple[Tensor, Tensor]:
            """Return queries, keys and values of the learned heads, and the values of a head that is left over."""
            qkv = old.reshape(*heads, *old.shape[1:])
            return qkv[:, :learned].flatten(0, 2), qkv[2, learned:].flatten(0, 1)

        old = attention.qkv
        weights, biases = rows(old.weight), (None, None) if old.bias is None else rows(old.bias)
        self.qkv = grow_linear(old, weights[0], biases[0], (3 * learned * self.head_dim, width))
        self.value = grow_linear(old, weights[1], biases[1], (uniform_width, width))
        self.q_norm, self.k_norm, self.attn_drop = attention.q_norm, attention.k_norm, attention.attn_drop
        shape = (width, learned * self.head_dim + uniform_width)
        self.proj = grow_linear(attention.proj, attention.proj.weight, attention.proj.bias, shape)
        self.proj_drop = attention.proj_drop
        self.train(attention.training)

    def forward(self, x_bnd: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise TreatmentError("uniform_heads averages over all tokens, so its attention takes no mask.")
        qkv = self.qkv(x_bnd).unflatten(-1, (3, self.learned_heads, self.head_dim))
        q_bhnd, k_bhnd, v_bhnd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        learned = self._attend(self.q_norm(q_bhnd), self.k_norm(k_bhnd), v_bhnd).transpose(1, 2).flatten(2)
        uniform = attend_uniformly(x_bnd, self.value)
        out: Tensor = self.proj_drop(self.proj(torch.cat((learned, uniform), dim=-1)))
        return out

    def _attend(self, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor) -> Tensor:
        if self.fused_attn:
            dropped = self.attn_drop.p if self.training else 0.0
            return F.scaled_dot_product_attention(q_bhnd, k_bhnd, v_bhnd, dropout_p=dropped)
        weights = (self.head_dim**-0.5 * q_bhnd @ k_bhnd.transpose(-2, -1)).softmax(dim=-1)
        out: Tensor = self.attn_drop(weights) @ v_bhnd
        return out


@register
class UniformHeads(Treatment):
    """Uniform attention as one head of every MSA [hyeonwoo2023 Sec. 3.3, Table 1].

    Attributes:
        variant: `replace` (A), `adjust` (B) or `append` (C).
    """

    name: ClassVar[str] = "uniform_heads"
    paper: ClassVar[str] = "hyeonwoo2023 Sec. 3.3, Table 1 (A, B, C)"
    changes: ClassVar[str] = (
        "one head of every MSA gives the mean of all values: in place of a learned head, or as one more"
    )
    costs: ClassVar[str] = "replace: 2d(D+1) parameters a block less; adjust: d less; append: the network d wider"
    part: ClassVar[str] = "attention by one softmax over tokens, of several heads"

    variant: Variant = Field(
        "replace",
        description="replace (A): the last head becomes uniform; adjust (B): and twice as wide, which makes up for the"
        " parameters; append (C): one more head, and a network wider by it",
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        units = anatomy.of_kind("msa")
        plain = {
            unit: unit.module for unit in units if isinstance(unit.module, Attention) and _can_rebuild(unit.module)
        }
        if not units or len(plain) < len(units):
            return self._level(anatomy, [unit for unit in units if unit not in plain], spec)
        for unit, module in plain.items():
            self._check(unit, module.num_heads)
            check_untouched(self.name, module, unit.name)
        if self.variant == "append":
            check_widening(anatomy, self.name)
        treated = {anatomy.path(module): self._convert(module) for module in plain.values()}
        for path, attention in treated.items():
            network.set_submodule(path, attention)
        if self.variant == "append":
            attentions = list(treated.values())
            widen(anatomy, by=attentions[0].head_dim, attentions=attentions)
        return network

    def _level(self, anatomy: Anatomy, others: Sequence[Unit], spec: ImageSpec) -> nn.Module:
        """Give the last head of any attention equal weights; its queries and keys stay, without use."""
        found = find_attentions(self, anatomy, spec)
        if self.variant != "replace":
            other = f"{others[0].name} is a {type(others[0].module).__name__} of another kind"
            why = f"variant {self.variant} rebuilds timm's plain Attention, and {other}; use variant replace"
            raise missing(self, anatomy.network, why)
        check_differentiable(self, anatomy.network, found)
        for attention in found:
            self._check(attention.unit, attention.heads)
            if is_edited(attention.module):
                raise TreatmentError(
                    f"{self.name} does not go with another treatment of attention, which {attention.unit.name} has"
                    " already: leave out one of the two."
                )
        for attention in found:
            options = edit_attention(attention.module, attention.heads, attention.unit.attention)
            options.seams = seams_of(anatomy, attention.unit)
            options.uniform_head = True
        return anatomy.network

    def _check(self, unit: Unit, heads: int) -> None:
        if heads == 1 and self.variant != "append":
            raise TreatmentError(
                f"{self.name} does not fit {unit.name}: its only head would be replaced; use variant append."
            )

    def _convert(self, attention: Any) -> UniformHeadAttention:
        heads, head_dim, width = attention.num_heads, attention.head_dim, attention.qkv.in_features
        if self.variant == "append":
            return UniformHeadAttention(attention, heads, head_dim, width + head_dim)
        wide = 2 if self.variant == "adjust" else 1
        return UniformHeadAttention(attention, heads - 1, wide * head_dim, width)


def _can_rebuild(module: Any) -> bool:
    """Return True for timm's plain attention, without a gate, a norm at its end or an edit."""
    plain = type(module) is Attention and module.gate is None and not is_edited(module)
    return plain and isinstance(module.norm, nn.Identity)
