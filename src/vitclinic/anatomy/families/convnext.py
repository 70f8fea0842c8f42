"""timm's ConvNeXt, V1 and V2: one residual, and so one conv unit, per block."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitclinic.anatomy.families.building import (
    conv_unit,
    head,
    hidden,
    image_channels,
    is_smoothing,
    pool,
    smoothed,
    stem,
)
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import out_of
from vitclinic.anatomy.units import Residual, Unit


def units(network: Any) -> list[Unit]:
    """Stem, and in each stage a pool (where the grid or the width changes), then a conv unit per block."""
    walk = [stem(network.stem, network, out_of(network.stem))]
    for stage, layer in enumerate(network.stages):
        name = f"stages.{stage}"
        if not isinstance(layer.downsample, nn.Identity):
            walk.append(pool(name, stage, layer.downsample, walk[-1].output, out_of(layer.downsample)))
        for index, block in enumerate(layer.blocks):
            if is_smoothing(block):
                walk[-1] = smoothed(walk[-1], block)
                continue
            residual = Residual(out_of(block.shortcut), out_of(block.drop_path), out_of(block))
            walk.append(conv_unit(f"{name}.blocks.{index}", stage, block, residual, activation=hidden(block.mlp)))
    return [*walk, head(network.head, network, walk[-1], network.norm_pre)]


def input_size(network: Any) -> tuple[int, int, int]:
    """Any multiple of the total stride will do."""
    return (image_channels(network), 64, 64)


CONVNEXT = Family("timm ConvNeXt", ("timm.models.convnext.ConvNeXt",), units, input_size)
