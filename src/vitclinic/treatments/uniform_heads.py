"""Uniform heads: uniform attention as a head of every MSA, the forms (A), (B) and (C) of hyeonwoo2023's Table 1.

Shapes: B images, N tokens (prefix tokens included), D channels, h learned heads of width d, w the uniform head's width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.anatomy import Anatomy, Unit
from vitclinic.errors import TreatmentError
from vitclinic.treatments.surgery import check_untouched
from vitclinic.treatments.treatment import Case, Treatment, register
from vitclinic.treatments.widening import check_widening, grown_linear, widen

Variant = Literal["replace", "adjust", "append"]
"""The paper's words for (A), (B) and (C)."""


class UniformHeadAttention(nn.Module):
    """Multi-head self-attention whose last head gives every token the mean of the values of all tokens.

        out_i = W_proj [head_1(x)_i, ..., head_h(x)_i, mean_j (W_value x_j)]

    Made from an attention of timm's with the weights that it has: `learned` of its heads stay; if a head is left over,
    its values become the uniform head's. The mean is taken before the projection to values, which commutes with it and
    then costs 1/N. Dropout on the attention acts on the learned heads only. What is wider than before is drawn as
    `widening.grown` says.
    """

    uniform_heads = 1
    """How many heads come after the learned ones in a recorded map (`vitclinic.anatomy.record_attention`)."""

    def __init__(self, attention: Any, learned: int, uniform_width: int, width: int) -> None:
        super().__init__()
        self.learned_heads, self.head_dim = learned, attention.head_dim
        self.fused_attn = attention.fused_attn
        heads = (3, attention.num_heads, attention.head_dim)

        def rows(old: Tensor) -> tuple[Tensor, Tensor]:
            """Queries, keys and values of the learned heads, and the values of a head that is left over."""
            qkv = old.reshape(*heads, *old.shape[1:])
            return qkv[:, :learned].flatten(0, 2), qkv[2, learned:].flatten(0, 1)

        old = attention.qkv
        weights, biases = rows(old.weight), (None, None) if old.bias is None else rows(old.bias)
        self.qkv = grown_linear(old, weights[0], biases[0], (3 * learned * self.head_dim, width))
        self.value = grown_linear(old, weights[1], biases[1], (uniform_width, width))
        self.q_norm, self.k_norm, self.attn_drop = attention.q_norm, attention.k_norm, attention.attn_drop
        shape = (width, learned * self.head_dim + uniform_width)
        self.proj = grown_linear(attention.proj, attention.proj.weight, attention.proj.bias, shape)
        self.proj_drop = attention.proj_drop
        self.train(attention.training)

    def forward(self, x_bnd: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise TreatmentError("uniform_heads averages over all tokens, so its attention takes no mask.")
        qkv = self.qkv(x_bnd).unflatten(-1, (3, self.learned_heads, self.head_dim))
        q_bhnd, k_bhnd, v_bhnd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        learned = self._attend(self.q_norm(q_bhnd), self.k_norm(k_bhnd), v_bhnd).transpose(1, 2).flatten(2)
        uniform = self.value(x_bnd.mean(dim=1, keepdim=True)).expand(-1, x_bnd.shape[1], -1)
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
    """Uniform attention as a head of every MSA."""

    name: ClassVar[str] = "uniform_heads"
    paper: ClassVar[str] = "hyeonwoo2023 Sec. 3.3, Table 1 (A, B, C)"
    changes: ClassVar[str] = (
        "one head of every MSA gives the mean of all values: in place of a learned head, or as one more"
    )
    costs: ClassVar[str] = "replace: 2d(D+1) parameters a block less; adjust: d less; append: the network d wider"
    families: ClassVar[tuple[str, ...]] = ("timm ViT", "timm PiT")

    variant: Variant = Field(
        "replace",
        description="replace (A): the last head becomes uniform; adjust (B): and twice as wide, which makes up for the"
        " parameters; append (C): one more head, and a network wider by it",
    )

    def operate(self, network: nn.Module, case: Case) -> nn.Module:
        anatomy = Anatomy.of(network)
        units = anatomy.of_kind("msa")
        for unit in units:
            self._check(unit)
        if self.variant == "append":
            check_widening(anatomy, self.name)
        treated = {anatomy.path(unit.module): self._treated(unit.module) for unit in units}
        for path, attention in treated.items():
            network.set_submodule(path, attention)
        if self.variant == "append":
            attentions = list(treated.values())
            widen(anatomy, by=attentions[0].head_dim, attentions=attentions)
        return network

    def _check(self, unit: Unit) -> None:
        attention: Any = unit.module
        plain = type(attention).__name__ == "Attention" and getattr(attention, "gate", None) is None
        if not plain or not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
            raise TreatmentError(
                f"{self.name} does not fit {unit.name}: it needs timm's plain attention, without a gate or a norm at"
                f" its end (found {type(attention).__name__})."
            )
        check_untouched(self.name, attention, unit.name)
        if attention.num_heads == 1 and self.variant != "append":
            raise TreatmentError(
                f"{self.name} does not fit {unit.name}: its only head would be replaced; use variant append."
            )

    def _treated(self, attention: Any) -> UniformHeadAttention:
        heads, head_dim, width = attention.num_heads, attention.head_dim, attention.qkv.in_features
        if self.variant == "append":
            return UniformHeadAttention(attention, heads, head_dim, width + head_dim)
        wide = 2 if self.variant == "adjust" else 1
        return UniformHeadAttention(attention, heads - 1, wide * head_dim, width)
