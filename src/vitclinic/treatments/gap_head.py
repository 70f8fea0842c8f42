"""Global average pooling over patches instead of a class token, and where any pooling finds what the classifier reads.

Shapes: B images, N tokens (P prefix tokens, then the patches), D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from timm.layers import PatchDropout
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Site, Unit, into, taps
from vitclinic.anatomy.forward import look
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import examine, missing, replace_at, run_once
from vitclinic.treatments.surgery import scores_of, treatments_of
from vitclinic.treatments.treatment import Treatment, register


def mean_of_patches(x_bnd: Tensor) -> Tensor:
    """Return the mean of the tokens, [B, D]."""
    with look():  # a sum of ours: those of the network are found by their number
        return x_bnd.mean(dim=1)


@register
class GapHead(Treatment):
    """Global average pooling: logits = head(norm(mean over patches of x^L)), no class token [park2022 Fig. 6]."""

    name: ClassVar[str] = "gap_head"
    paper: ClassVar[str] = "park2022 Sec. 2, Fig. 6"
    changes: ClassVar[str] = "the classifier reads the mean of the patches; class and distillation tokens are removed"
    costs: ClassVar[str] = "a token and its parameters less (2 D in a ViT); no more time"
    part: ClassVar[str] = "a classifier that reads a class token among the patches"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        check_pooled_once(network)
        if isinstance(network, VisionTransformer):
            return pool_in_timm(self, network)
        (head,) = examine(self, network, spec).of_kind("head")
        find_class_token(self, head, network, spec).replace(mean_of_patches)
        return network


def check_pooled_once(network: nn.Module) -> None:
    """Raise a TreatmentError if another treatment has replaced what the classifier reads."""
    if found := {"gap_head", "sequence_pooling"} & set(treatments_of(network)):
        raise TreatmentError(
            f"gap_head and sequence_pooling both replace what the classifier reads, and this network has {found.pop()}:"
            " leave out one of the two."
        )


class ClassToken(NamedTuple):
    """The prefix tokens of the last state, which a classifier reads: where they pass, and how many there are."""

    place: Site
    prefix: int

    def replace(self, pool: Callable[[Tensor], Tensor]) -> None:
        """Put `pool(patches)`, [B, D], in their place; `pool` is a function or a module of the network."""
        replace_at(self.place, _PooledFirst(self.prefix, pool).apply)


def find_class_token(treatment: Treatment, head: Unit, network: nn.Module, spec: ImageSpec) -> ClassToken:
    """Return the class token that the classifier of a network reads, among the patches of the last state.

    Raises:
        TreatmentError: There is none.
    """
    prefix = head.input.layout.prefix
    if not prefix:
        raise missing(treatment, network, "this one has no class token")
    if head.input.arrangement is not None and not head.input.arrangement.begins_with(prefix):
        raise missing(treatment, network, "its class token is not the first of its tokens")
    place = _last_state(head, network, spec)
    if place is None:
        raise missing(treatment, network, "its last state is not one sequence of tokens")
    if not _reads(prefix, place, network, spec):
        raise missing(treatment, network, "its classifier does not read its class token")
    return ClassToken(place, prefix)


def _last_state(head: Unit, network: nn.Module, spec: ImageSpec) -> Site | None:
    """Return where the tokens of the last state are, [B, N, C]: before the final norm, if that sees all of them."""
    sites = {"state": head.input} if head.norm is None else {"norm": into(head.norm), "state": head.input}
    with taps(sites) as seen:
        run_once(network, spec, batch=2)
    if seen["state"].ndim != 3 or len(seen["state"]) != 2:
        return None
    whole = "norm" in seen and seen["norm"].shape == seen["state"].shape
    return sites["norm"] if whole else head.input


def _reads(prefix: int, place: Site, network: nn.Module, spec: ImageSpec) -> bool:
    """Return True if the network's output depends on the prefix tokens of its last state.

    NaN in these tokens shows it even where a classifier's weights are zero, as before training.
    """

    def spoil(x_bnd: Tensor) -> Tensor:
        x_bnd = x_bnd.clone()
        x_bnd[:, :prefix] = torch.nan
        return x_bnd

    handles = replace_at(place, spoil)
    try:
        return bool(scores_of(run_once(network, spec)).isnan().any())
    finally:
        for handle in handles:
            handle.remove()


class _PooledFirst:
    """What a pooling makes of the patches, in place of the prefix tokens of a state."""

    def __init__(self, prefix: int, pool: Callable[[Tensor], Tensor]) -> None:
        self._prefix, self._pool = prefix, pool

    def apply(self, x_bnd: Tensor) -> Tensor:
        patches_bnd = x_bnd[:, self._prefix :]
        pooled_b1d = self._pool(patches_bnd).unsqueeze(1)
        return torch.cat((pooled_b1d.expand(-1, self._prefix, -1), patches_bnd), dim=1)


def pool_in_timm(treatment: Treatment, vit: Any) -> nn.Module:
    """Pool a timm ViT by mean, without class and distillation tokens.

    Raises:
        TreatmentError: Its head pools by attention or not at all, or its tokens have been counted.
    """
    name = treatment.name
    for later in ("local_attention", "patch_dropout"):
        if later in treatments_of(vit):
            raise TreatmentError(f"List {name} before {later}, which counts the tokens that {name} removes.")
    if vit.attn_pool is not None or not vit.global_pool:
        found = f"'{vit.global_pool}'"
        raise TreatmentError(f"{name} replaces a class token or mean or max pooling; this head is {found}.")
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
    pooled: nn.Module = vit
    return pooled


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
