"""timm's transformers and MLP-Mixers: ViT and DeiT, PiT, Swin and Swin V2, VOLO, and Mixer, ResMLP and gMLP.

ViTs may have class, distillation and register tokens, and pre-norm or residual post-norm blocks; Swin's attention is in
windows, VOLO's outlookers have no attention map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vitclinic.anatomy.families.family import (
    Family,
    Step,
    count_prefix,
    extra_step,
    head,
    hidden,
    image_channels,
    is_extra,
    pool,
    position,
    residual_block,
    softmax_attention,
    stem,
    transformer_block,
    unknown_block,
)
from vitclinic.anatomy.maps import Windows
from vitclinic.anatomy.sites import NHWC, OFF_GRID, Layout, Size, into, out_of
from vitclinic.anatomy.units import Unit

_POST_NORM = {"Block": False, "ResPostBlock": True}


def vit_units(network: Any) -> list[Unit]:
    """Return stem, position (if learned), and an MSA and an MLP per block."""
    # Channels last with `dynamic_img_size`, tokens otherwise; the grid is what the patch projection gives.
    patches = Layout(channels_last=True, grid_at=out_of(network.patch_embed.proj))
    # Some have registers and no class token, or one that the head does not read.
    has_class = network.cls_token is not None and network.global_pool in ("token", "")
    own = Layout(prefix=network.num_prefix_tokens, grid_at=patches.grid_at, has_class=has_class)
    tokens = replace(own, prefix=count_prefix(network, own.prefix))
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed, patches))]
    if network.pos_embed is not None:
        after = out_of(network.pos_drop, own)
        walk.append(position(network.pos_embed, network.pos_drop, walk[-1].output, after))
    for index, block in enumerate(network.blocks):
        name, kind = f"blocks.{index}", type(block).__name__
        if is_extra(block):
            walk += extra_step(name, 0, block, tokens)
            continue
        if kind not in _POST_NORM or type(block.attn).__name__ == "DiffAttention":  # two softmaxes
            raise unknown_block(name, block)
        attention = softmax_attention(block.attn, tokens)
        walk += transformer_block(name, 0, block, tokens, attention=attention, post_norm=_POST_NORM[kind])
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def vit_input_size(network: Any) -> tuple[int, int, int]:
    """Return the size that the position embedding was made for."""
    return (image_channels(network), *network.patch_embed.img_size)


VIT = Family("timm ViT", ("timm.models.vision_transformer.VisionTransformer",), vit_units, vit_input_size)


def pit_units(network: Any) -> list[Unit]:
    """Return stem, position and, per stage, a pool (except in the first), then an MSA and an MLP per block."""
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
            if is_extra(block):
                walk += extra_step(f"{name}.blocks.{index}", stage, block, tokens)
                continue
            attention = softmax_attention(block.attn, tokens)
            walk += transformer_block(f"{name}.blocks.{index}", stage, block, tokens, attention=attention)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


PIT = Family("timm PiT", ("timm.models.pit.PoolingVisionTransformer",), pit_units, vit_input_size)


def swin_units(network: Any, *, post_norm: bool) -> list[Unit]:
    """Return the stem and, per stage, a pool (except in the first), then an MSA and an MLP per block."""
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed, NHWC))]
    for stage, layer in enumerate(network.layers):
        name = f"layers.{stage}"
        if stage > 0:
            after = out_of(layer.downsample, NHWC)
            walk.append(pool(name, stage, layer.downsample, walk[-1].output, after))
        layout = Layout(channels_last=True, grid_at=into(layer.blocks[0], NHWC))
        for index, block in enumerate(layer.blocks):
            if is_extra(block):
                walk += extra_step(f"{name}.blocks.{index}", stage, block, layout)
                continue
            attention = softmax_attention(block.attn, layout, partial(_swin_windows, block))
            walk += transformer_block(
                f"{name}.blocks.{index}", stage, block, layout, attention=attention, post_norm=post_norm
            )
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _swin_windows(block: Any, grid: Size) -> Windows:
    # timm has already fitted both to the block's grid.
    return Windows(tuple(block.window_size), tuple(block.shift_size))


def swin_input_size(network: Any) -> tuple[int, int, int]:
    """Return the size that the windows were fitted to."""
    return (image_channels(network), *network.patch_embed.img_size)


SWIN = Family(
    "timm Swin",
    ("timm.models.swin_transformer.SwinTransformer",),
    partial(swin_units, post_norm=False),
    swin_input_size,
)
SWIN_V2 = Family(
    "timm Swin V2",
    ("timm.models.swin_transformer_v2.SwinTransformerV2",),
    partial(swin_units, post_norm=True),
    swin_input_size,
)


_POSITION_BEFORE = 2
"""timm adds the position embedding before this entry of the network's list, for any number of stages."""


def volo_units(network: Any) -> list[Unit]:
    """Return the stem; stages, pools and position in the order of the network's list; class blocks; head."""
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed))]
    layout, stage = NHWC, 0
    for index, entry in enumerate(network.network):
        if index == _POSITION_BEFORE:
            after = out_of(network.pos_drop, NHWC)
            walk.append(position(network.pos_embed, network.pos_drop, walk[-1].output, after, stage))
        if isinstance(entry, nn.Sequential):
            layout = Layout(channels_last=True, grid_at=into(entry, NHWC))
            for place, block in enumerate(entry):
                walk += _volo_block(f"network.{index}.{place}", stage, block, layout)
            stage += 1
        else:
            walk.append(pool(f"network.{index}", stage, entry, walk[-1].output, out_of(entry, NHWC)))
    tokens = Layout(prefix=1, grid_at=layout.grid_at)
    for index, block in enumerate(network.post_network or ()):
        walk += _volo_class_block(f"post_network.{index}", stage, block, tokens)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _volo_block(name: str, stage: int, block: Any, layout: Layout) -> Iterator[Unit]:
    if is_extra(block):
        return extra_step(name, stage, block, layout)
    attention = None if type(block).__name__ == "Outlooker" else softmax_attention(block.attn, layout)
    return transformer_block(name, stage, block, layout, attention=attention)


def _volo_class_block(name: str, stage: int, block: Any, tokens: Layout) -> list[Unit]:
    if is_extra(block):
        return list(extra_step(name, stage, block, tokens))
    states = [into(block, OFF_GRID, first=1), into(block.norm2, OFF_GRID), out_of(block, OFF_GRID, first=1)]
    steps = [
        Step(
            "msa",
            block.attn,
            block.norm1,
            out_of(block.drop_path1, OFF_GRID),
            softmax_attention(block.attn, tokens),
        ),
        Step("mlp", block.mlp, block.norm2, out_of(block.drop_path2, OFF_GRID), activation=hidden(block.mlp)),
    ]
    msa, mlp = residual_block(name, stage, states, steps)
    return [replace(msa, input=into(block, tokens)), replace(mlp, output=out_of(block, tokens))]


def volo_input_size(network: Any) -> tuple[int, int, int]:
    """Return the size that the position embedding was made for."""
    convs = [module for module in network.patch_embed.modules() if isinstance(module, nn.Conv2d)]  # one behind another
    patch = math.prod(conv.stride[0] for conv in convs)
    height, width = (network.pos_embed.shape[axis] * patch * network.pooling_scale for axis in (1, 2))
    return (image_channels(network), height, width)


VOLO = Family("timm VOLO", ("timm.models.volo.VOLO",), volo_units, volo_input_size)


def mixer_units(network: Any) -> list[Unit]:
    """Return the stem, then a token-MLP and an MLP per block (gMLP: one token-MLP, which does both)."""
    tokens = Layout(grid_at=out_of(network.stem.proj))
    walk = [stem(network.stem, network, out_of(network.stem, tokens))]
    for index, block in enumerate(network.blocks):
        walk += _mixer_block(f"blocks.{index}", block, tokens)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _mixer_block(name: str, block: Any, tokens: Layout) -> Iterator[Unit]:
    if is_extra(block):
        return extra_step(name, 0, block, tokens)
    # Both steps of a block share one drop_path, in this order.
    branches = [out_of(block.drop_path, tokens, within=block, call=call) for call in range(2)]
    kind = type(block).__name__
    if kind == "SpatialGatingBlock":
        states = [into(block, tokens), out_of(block, tokens)]
        steps = [Step("token_mlp", block.mlp_channels, block.norm, branches[0], activation=hidden(block.mlp_channels))]
    elif kind in ("MixerBlock", "ResBlock"):
        mixing = block.mlp_tokens if kind == "MixerBlock" else block.linear_tokens
        states = [into(block, tokens), into(block.norm2, tokens), out_of(block, tokens)]
        steps = [
            Step("token_mlp", mixing, block.norm1, branches[0], activation=hidden(mixing)),
            Step("mlp", block.mlp_channels, block.norm2, branches[1], activation=hidden(block.mlp_channels)),
        ]
    else:
        raise unknown_block(name, block)
    return residual_block(name, 0, states, steps)


def mixer_input_size(network: Any) -> tuple[int, int, int]:
    """Return the size that the token-mixing weights were made for."""
    return (image_channels(network), *network.stem.img_size)


MIXER = Family("timm MLP-Mixer", ("timm.models.mlp_mixer.MlpMixer",), mixer_units, mixer_input_size)
