"""timm's Swin and Swin V2: features are [B, H, W, C] outside the blocks and [B, N, C] at their MLP.

The state after attention enters norm2 in Swin (pre-norm) and the MLP in Swin V2 (post-norm).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vitclinic.anatomy.families.building import head, image_channels, pool, stem, transformer_block
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import NHWC, Layout, Size, into, out_of
from vitclinic.anatomy.units import AttentionSpec, Unit
from vitclinic.anatomy.windows import Windows


def units(network: Any, *, post_norm: bool) -> list[Unit]:
    """Stem, and in each stage a pool (but for the first), then an MSA and an MLP per block."""
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed, NHWC))]
    for stage, layer in enumerate(network.layers):
        name = f"layers.{stage}"
        if stage > 0:
            after = out_of(layer.downsample, NHWC)
            walk.append(pool(name, stage, layer.downsample, walk[-1].output, after))
        layout = Layout(channels_last=True, grid_at=into(layer.blocks[0], NHWC))
        for index, block in enumerate(layer.blocks):
            attention = AttentionSpec(block.attn, layout, partial(_windows, block))
            walk += transformer_block(
                f"{name}.blocks.{index}", stage, block, layout, attention=attention, post_norm=post_norm
            )
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _windows(block: Any, grid: Size) -> Windows:
    # timm has already fitted both to the block's grid.
    return Windows(tuple(block.window_size), tuple(block.shift_size))


def input_size(network: Any) -> tuple[int, int, int]:
    """The size the windows were fitted to."""
    return (image_channels(network), *network.patch_embed.img_size)


SWIN = Family(
    "timm Swin",
    ("timm.models.swin_transformer.SwinTransformer",),
    partial(units, post_norm=False),
    input_size,
)
SWIN_V2 = Family(
    "timm Swin V2",
    ("timm.models.swin_transformer_v2.SwinTransformerV2",),
    partial(units, post_norm=True),
    input_size,
)
