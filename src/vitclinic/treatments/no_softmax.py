"""ViT-Free: attention without its softmax."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import edit_attention
from vitclinic.treatments.neighbourhood import seams_of
from vitclinic.treatments.parts import check_differentiable, examine, find_attentions
from vitclinic.treatments.surgery import treatments_of
from vitclinic.treatments.treatment import Treatment, register


@register
class NoSoftmax(Treatment):
    """Attention that weighs values by the raw logits, z = (q k^T / sqrt(d)) v [chen2022 Sec. 3]."""

    name: ClassVar[str] = "no_softmax"
    paper: ClassVar[str] = "chen2022 Sec. 3 (ViT-B/16-Free)"
    changes: ClassVar[str] = "attention weighs values by its logits, without a softmax"
    costs: ClassVar[str] = "no parameters; products linear in the number of tokens, without attention dropout and masks"
    part: ClassVar[str] = "attention by one softmax over tokens"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if "talking_heads" in treatments_of(network):
            raise TreatmentError(
                "no_softmax cannot be combined with talking_heads, which mixes heads before and after the softmax:"
                " without it, both mixes are one; leave out one of the two."
            )
        anatomy = examine(self, network, spec)
        attentions = find_attentions(self, anatomy, spec)
        check_differentiable(self, network, attentions)
        for found in attentions:
            attention = edit_attention(found.module, found.heads, found.unit.attention)
            attention.seams = seams_of(anatomy, found.unit)
            attention.softmax_free = True
        return network
