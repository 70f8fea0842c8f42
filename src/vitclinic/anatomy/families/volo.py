"""timm's VOLO: outlook attention on a fine grid, transformer blocks on a coarse one, then class attention.

Outlook attention weighs the neighbours of each place by a linear layer: it has no map of tokens by tokens, so
its MSA units declare none. A class block changes the class token only: the states of its units are that
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from vitclinic.anatomy.families.building import (
    Step,
    head,
    hidden,
    image_channels,
    pool,
    position,
    residual_block,
    stem,
    transformer_block,
)
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import NHWC, OFF_GRID, Layout, into, out_of
from vitclinic.anatomy.units import AttentionSpec, Unit

_POSITION_BEFORE = 2
"""timm adds the position embedding before this entry of the network's list, whatever the stages are."""


def units(network: Any) -> list[Unit]:
    """Stem; stages, pools and position in the order of the network's list; class blocks; head."""
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed))]
    layout, stage = NHWC, 0
    for index, entry in enumerate(network.network):
        if index == _POSITION_BEFORE:
            after = out_of(network.pos_drop, NHWC)
            walk.append(position(network.pos_embed, network.pos_drop, walk[-1].output, after, stage))
        if isinstance(entry, nn.Sequential):
            layout = Layout(channels_last=True, grid_at=into(entry, NHWC))
            for place, block in enumerate(entry):
                walk += _block(f"network.{index}.{place}", stage, block, layout)
            stage += 1
        else:
            walk.append(pool(f"network.{index}", stage, entry, walk[-1].output, out_of(entry, NHWC)))
    tokens = Layout(prefix=1, grid_at=layout.grid_at)
    for index, block in enumerate(network.post_network or ()):
        walk += _class_block(f"post_network.{index}", stage, block, tokens)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _block(name: str, stage: int, block: Any, layout: Layout) -> Iterator[Unit]:
    attention = None if type(block).__name__ == "Outlooker" else AttentionSpec(block.attn, layout)
    return transformer_block(name, stage, block, layout, attention=attention)


def _class_block(name: str, stage: int, block: Any, tokens: Layout) -> list[Unit]:
    states = [into(block, OFF_GRID, first=1), into(block.norm2, OFF_GRID), out_of(block, OFF_GRID, first=1)]
    steps = [
        Step(
            "msa",
            block.attn,
            block.norm1,
            out_of(block.drop_path1, OFF_GRID),
            AttentionSpec(block.attn, tokens),
        ),
        Step("mlp", block.mlp, block.norm2, out_of(block.drop_path2, OFF_GRID), activation=hidden(block.mlp)),
    ]
    msa, mlp = residual_block(name, stage, states, steps)
    return [replace(msa, input=into(block, tokens)), replace(mlp, output=out_of(block, tokens))]


def input_size(network: Any) -> tuple[int, int, int]:
    """The size the position embedding was made for."""
    convs = [module for module in network.patch_embed.modules() if isinstance(module, nn.Conv2d)]  # one behind another
    patch = math.prod(conv.stride[0] for conv in convs)
    height, width = (network.pos_embed.shape[axis] * patch * network.pooling_scale for axis in (1, 2))
    return (image_channels(network), height, width)


VOLO = Family("timm VOLO", ("timm.models.volo.VOLO",), units, input_size)
