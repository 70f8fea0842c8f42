"""timm's PiT: stages of ViT blocks on grids that a depthwise conv halves, class tokens beside them."""

from __future__ import annotations

from typing import Any

from vitclinic.anatomy.families.building import (
    head,
    image_channels,
    pool,
    position,
    softmax_attention,
    stem,
    transformer_block,
)
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import Layout, out_of
from vitclinic.anatomy.units import Unit


def units(network: Any) -> list[Unit]:
    """Stem, position, and in each stage a pool (but for the first), then an MSA and an MLP per block."""
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed))]
    grid = out_of(network.pos_drop)
    walk.append(position(network.pos_embed, network.pos_drop, walk[-1].output, grid))
    for stage, transformer in enumerate(network.transformers):
        name = f"transformers.{stage}"
        if transformer.pool is not None:
            grid = out_of(transformer.pool)
            walk.append(pool(name, stage, transformer.pool, walk[-1].output, grid))
        tokens = Layout(prefix=network.num_tokens, grid_at=grid)
        for index, block in enumerate(transformer.blocks):
            attention = softmax_attention(block.attn, tokens)
            walk += transformer_block(f"{name}.blocks.{index}", stage, block, tokens, attention=attention)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def input_size(network: Any) -> tuple[int, int, int]:
    """The size the position embedding was made for."""
    return (image_channels(network), *network.patch_embed.img_size)


PIT = Family("timm PiT", ("timm.models.pit.PoolingVisionTransformer",), units, input_size)
