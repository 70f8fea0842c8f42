"""AlterNet [park2022 Sec. 4.1, App. E]: a pre-activation ResNet whose stages end with alternating MSA blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models import generate_default_cfgs, register_model

from vitclinic.models.msa_block import Activation, MsaBlock, MsaOptions, msa_in_place_of
from vitclinic.models.preact_resnet import (
    PUBLISHED,
    PreActBasicBlock,
    PreActBottleneck,
    PreActResNet,
    Stem,
    build,
)

HEADS = (3, 6, 12, 24)
"""Heads of the MSAs of each stage, "more heads and higher hidden dimensions in late stages"; of Swin."""

_MSAS: dict[str, tuple[int, ...]] = {"imagenet": (0, 1, 3, 2), "cifar": (0, 1, 1, 2)}
_WINDOW = {"imagenet": 7, "cifar": 4}


def alternating(blocks: int, msas: int) -> list[bool]:
    """Which blocks of a stage are MSAs: counted from its end, MSA, Conv, MSA, Conv ... until there are `msas`.

    The first block of a stage subsamples and stays a Conv.

    Example:
        >>> ["MSA" if msa else "Conv" for msa in alternating(6, 2)]
        ['Conv', 'Conv', 'Conv', 'MSA', 'Conv', 'MSA']
    """
    if not 0 <= msas <= blocks // 2:
        raise ValueError(f"a stage of {blocks} blocks has room for 0 to {blocks // 2} MSAs, not for {msas}.")
    return [False] * (blocks - 2 * msas) + [False, True] * msas


class AlterNet(PreActResNet):
    """Pre-activation ResNet with `msas` MSA blocks in each stage, alternating with Convs from the stage's end.

    Without `msas` and `window`, those of the paper for the stem: (0, 1, 3, 2) and 7 for ImageNet, (0, 1, 1, 2) and 4
    for CIFAR, fewer where a stage is too short. `shared_bias=True` and `msa_act="gelu"` are the authors' code where it
    differs from their text.
    """

    def __init__(
        self,
        block: type[PreActBasicBlock] | type[PreActBottleneck],
        layers: Sequence[int],
        *,
        stem: Stem = "imagenet",
        msas: Sequence[int] | None = None,
        heads: Sequence[int] = HEADS,
        head_width: int = 64,
        window: int | None = None,
        shared_bias: bool = False,
        msa_act: Activation = "relu",
        **keywords: Any,
    ) -> None:
        super().__init__(block, layers, stem=stem, **keywords)
        if msas is None:
            msas = [min(most, blocks // 2) for most, blocks in zip(_MSAS[stem], layers, strict=True)]
        if not len(msas) == len(heads) == len(layers):
            raise ValueError("msas and heads are four numbers each, one for each stage.")
        options: MsaOptions = {
            "head_width": head_width,
            "window": window or _WINDOW[stem],
            "shared_bias": shared_bias,
            "msa_act": msa_act,
        }
        for stage, pattern in enumerate(map(alternating, layers, msas)):
            blocks = self.stage(stage)
            for index in (index for index, is_msa in enumerate(pattern) if is_msa):
                blocks[index] = msa_in_place_of(blocks[index], MsaBlock, heads[stage], **options)


default_cfgs = generate_default_cfgs({f"alternet{depth}.untrained": PUBLISHED for depth in (18, 34, 50, 101)})


@register_model  # type: ignore[untyped-decorator]
def alternet18(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Alter-ResNet-18; its last stage is even as it is."""
    keywords = {"block": PreActBasicBlock, "layers": (2, 2, 2, 2), **keywords}
    return build("alternet18", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet34(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Alter-ResNet-34: ResNet-34 with one more block in the last stage."""
    keywords = {"block": PreActBasicBlock, "layers": (3, 4, 6, 4), **keywords}
    return build("alternet34", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet50(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Alter-ResNet-50: ResNet-50 with one more block in the last stage."""
    keywords = {"block": PreActBottleneck, "layers": (3, 4, 6, 4), **keywords}
    return build("alternet50", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet101(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Alter-ResNet-101: ResNet-101 with one more block in the last stage."""
    keywords = {"block": PreActBottleneck, "layers": (3, 4, 23, 4), **keywords}
    return build("alternet101", AlterNet, pretrained, **keywords)
