"""One more attention or one more MLP at the end of a ViT, at nearly the same cost."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field
from timm.layers import Mlp, trunc_normal_
from timm.models.vision_transformer import Attention, ResPostBlock
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.data import ImageSpec
from vitclinic.treatments.surgery import check_untouched
from vitclinic.treatments.treatment import Treatment, register

M = TypeVar("M", bound=nn.Module)

MLP_RATIO = 2
"""An MLP of this ratio has 4 D^2 weights, like an attention."""


class _OneStep(nn.Module):
    """x + branch(x), with norm, layer scale and stochastic depth as in the network's own blocks."""

    def __init__(self, norm: nn.Module, scale: nn.Module, drop_path: nn.Module, post_norm: bool) -> None:
        super().__init__()
        self.norm = norm
        self.ls = scale
        self.drop_path = drop_path
        self.post_norm = post_norm

    def forward(self, x_bnd: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        inner_bnd = x_bnd if self.post_norm else self.norm(x_bnd)
        branch_bnd = self.ls(self.branch(inner_bnd, attn_mask, is_causal))
        return x_bnd + self.drop_path(self.norm(branch_bnd) if self.post_norm else branch_bnd)  # type: ignore[no-any-return]

    def branch(self, x_bnd: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        raise NotImplementedError


class MsaBlock(_OneStep):
    """A block with attention only."""

    def __init__(self, attn: nn.Module, *parts: Any) -> None:
        super().__init__(*parts)
        self.attn = attn

    def branch(self, x_bnd: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return self.attn(x_bnd, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]


class MlpBlock(_OneStep):
    """A block with an MLP only."""

    def __init__(self, mlp: nn.Module, *parts: Any) -> None:
        super().__init__(*parts)
        self.mlp = mlp

    def branch(self, x_bnd: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return self.mlp(x_bnd)  # type: ignore[no-any-return]


@register
class ExtraBlock(Treatment):
    """A step x + MSA(norm(x)) or x + MLP(norm(x)) after the last block [hyeonwoo2023 Sec. 3.1, Fig. 3].

    Attributes:
        kind: `msa` for attention, `mlp` for an MLP of ratio 2.
    """

    name: ClassVar[str] = "extra_block"
    paper: ClassVar[str] = "hyeonwoo2023 Sec. 3.1, Fig. 3"
    changes: ClassVar[str] = "one more attention, or one more MLP of ratio 2, at the end"
    costs: ClassVar[str] = "msa: 4 D^2 + 6 D parameters, mlp: 4 D^2 + 5 D; the time of a third of a block"
    families: ClassVar[tuple[str, ...] | None] = ("timm ViT",)

    kind: Literal["msa", "mlp"] = Field("msa", description="`msa`: attention; `mlp`: an MLP of ratio 2")

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        name = Anatomy.of(network).blocks[-1].name
        last: Any = network.get_submodule(name)
        post_norm = isinstance(last, ResPostBlock)
        if self.kind == "msa":
            if type(last.attn) is not Attention:
                raise TreatmentError(
                    f"extra_block copies timm's Attention, but that of the last block is a {type(last.attn).__name__};"
                    " list extra_block before the treatments of attention."
                )
            check_untouched(self.name, last.attn, f"{name}.msa", act="copy")
            module: nn.Module = _copy_initialized(last.attn)
        else:
            module = _build_mlp(last)
        norm = _copy_initialized(last.norm1)
        if post_norm and last.init_values is not None:  # timm's layer scale of such blocks
            nn.init.constant_(norm.weight, last.init_values)
        scale = nn.Identity() if post_norm else _copy_initialized(last.ls1)
        block = (MsaBlock if self.kind == "msa" else MlpBlock)(
            module, norm, scale, copy.deepcopy(last.drop_path1), post_norm
        )
        network.get_submodule("blocks").append(block.train(network.training))  # type: ignore[operator]
        return network


def _build_mlp(block: Any) -> nn.Module:
    """Build an MLP of ratio 2 with the activation, dropout and dtype of a block's own MLP, if it has them."""
    like: Tensor = block.norm1.weight
    mlp: nn.Module = Mlp(
        like.shape[0],
        MLP_RATIO * like.shape[0],
        bias=block.attn.proj.bias is not None,
        drop=getattr(getattr(block.mlp, "drop1", None), "p", 0.0),
        device=like.device,
        dtype=like.dtype,
    )
    if isinstance(getattr(block.mlp, "act", None), nn.Module):
        mlp.act = copy.deepcopy(block.mlp.act)
    return _copy_initialized(mlp)


def _copy_initialized(module: M) -> M:
    """Return a copy with timm's initial values for ViTs: truncated normal matrices (std 0.02), zero biases."""
    module = copy.deepcopy(module)
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if isinstance(part, nn.Linear):
            trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif callable(reset):
            reset()
    return module
