"""Global average pooling over patches instead of a class token."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers import PatchDropout
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.surgery import treatments_of
from vitclinic.treatments.treatment import Treatment, register


@register
class GapHead(Treatment):
    """Global average pooling: logits = head(norm(mean over patches of x^L)), no class token [park2022 Fig. 6]."""

    name: ClassVar[str] = "gap_head"
    paper: ClassVar[str] = "park2022 Sec. 2, Fig. 6"
    changes: ClassVar[str] = "the classifier reads the mean of the patches; class and distillation tokens are removed"
    costs: ClassVar[str] = "a token and its parameters less (2 D in a ViT); no more time"
    families: ClassVar[tuple[str, ...] | None] = ("timm ViT",)

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if "local_attention" in treatments_of(network):
            raise TreatmentError("List gap_head before local_attention, which counts the tokens that gap_head removes.")
        vit: Any = network
        if vit.attn_pool is not None or not vit.global_pool:
            found = f"'{vit.global_pool}'"
            raise TreatmentError(f"gap_head replaces a class token or mean or max pooling; this head is {found}.")
        if isinstance(vit, VisionTransformerDistilled):
            _remove_distillation(vit)
        if vit.cls_token is not None:
            _remove_token(vit, "cls_token", entry=0)
            vit.has_class_token = False
        vit.global_pool = "avg"
        vit.pool_include_prefix = False
        if isinstance(vit.fc_norm, nn.Identity):
            # In such networks timm puts the final norm after the mean.
            vit.norm, vit.fc_norm = vit.fc_norm, vit.norm
        return network


def _remove_distillation(vit: Any) -> None:
    """Turn a distilled DeiT into the plain ViT it derives from: one token and one head instead of two."""
    _remove_token(vit, "dist_token", entry=1)
    del vit.dist_token, vit.head_dist, vit.distilled_training
    # The subclass only overrides the handling of its second token and second head, which are gone.
    vit.__class__ = VisionTransformer


def _remove_token(vit: Any, name: str, entry: int) -> None:
    """Remove a prefix token and its entry in the position embedding."""
    setattr(vit, name, None)
    vit.num_prefix_tokens -= 1
    if isinstance(vit.patch_drop, PatchDropout):
        vit.patch_drop.num_prefix_tokens -= 1
    if vit.pos_embed is not None and not vit.no_embed_class:
        kept = [index for index in range(vit.pos_embed.shape[1]) if index != entry]
        vit.pos_embed = nn.Parameter(vit.pos_embed.detach()[:, kept], requires_grad=vit.pos_embed.requires_grad)
