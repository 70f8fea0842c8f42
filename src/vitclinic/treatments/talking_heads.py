"""Talking heads: learned mixes of the heads' logits and weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import edit_attention
from vitclinic.treatments.parts import check_differentiable, examine, find_attentions
from vitclinic.treatments.surgery import treatments_of
from vitclinic.treatments.treatment import Treatment, register


@register
class TalkingHeads(Treatment):
    """Talking heads: A = W softmax(L q k^T / sqrt(d)), L and W in R^{H x H}, initially the identity [gong2021]."""

    name: ClassVar[str] = "talking_heads"
    paper: ClassVar[str] = "gong2021 Table 6 (talking-heads attention, Shazeer et al. 2020)"
    changes: ClassVar[str] = "heads exchange logits before the softmax and weights behind it"
    costs: ClassVar[str] = "2 H^2 parameters a block; attention is not fused: its maps are held in memory"
    part: ClassVar[str] = "attention by one softmax over tokens"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if "no_softmax" in treatments_of(network):
            raise TreatmentError(
                "talking_heads mixes heads before and after the softmax, which no_softmax removes: without it,"
                " both mixes are one; leave out one of the two."
            )
        like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
        attentions = find_attentions(self, examine(self, network, spec), spec)
        check_differentiable(self, network, attentions)
        for found in attentions:
            edit_attention(found.module, found.heads, found.unit.attention)
            for name in ("logits_mix", "weights_mix"):
                identity = torch.eye(found.heads, dtype=like.dtype, device=like.device)
                found.module.register_parameter(name, nn.Parameter(identity))
        return network
