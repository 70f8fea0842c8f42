"""torchvision's ViT, Swin (V1 and V2) and ConvNeXt. Its ResNet shares the walk of timm's (`convnets.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from vitclinic.anatomy.families.family import (
    Family,
    Step,
    activation_among,
    conv_unit,
    count_prefix,
    extra_step,
    head,
    image_channels,
    is_extra,
    is_smoothing,
    pool,
    position,
    read_after_blur,
    residual_block,
    softmax_attention,
    stem,
)
from vitclinic.anatomy.maps import Windows
from vitclinic.anatomy.sites import NHWC, Layout, Size, into, out_of
from vitclinic.anatomy.units import Residual, Unit


def vit(network: Any) -> list[Unit]:
    """Return stem, position, and an MSA and an MLP per block."""
    encoder = network.encoder
    tokens = Layout(prefix=count_prefix(network, 1), grid_at=out_of(network.conv_proj))
    walk = [stem(network.conv_proj, network, out_of(network.conv_proj))]
    after = out_of(encoder.dropout, tokens)
    walk.append(position(encoder.pos_embedding, encoder.dropout, walk[-1].output, after))
    for index, block in enumerate(encoder.layers):
        if is_extra(block):
            walk += extra_step(f"encoder.layers.encoder_layer_{index}", 0, block, tokens)
            continue
        walk += residual_block(
            f"encoder.layers.encoder_layer_{index}",
            0,
            [into(block, tokens), into(block.ln_2, tokens), out_of(block, tokens)],
            [
                Step(
                    "msa",
                    block.self_attention,
                    block.ln_1,
                    out_of(block.dropout, tokens),
                    softmax_attention(block.self_attention, tokens),
                ),
                Step("mlp", block.mlp, block.ln_2, out_of(block.mlp, tokens), activation=activation_among(block.mlp)),
            ],
        )
    return [*walk, head(network.heads, network, walk[-1], encoder.ln)]


def swin(network: Any) -> list[Unit]:
    """Return the stem, then stages and pools in turn, with an MSA and an MLP per block."""
    walk = [stem(network.features[0], network, out_of(network.features[0], NHWC))]
    for index, entry in enumerate(network.features[1:], start=1):
        stage, name = index // 2, f"features.{index}"
        if index % 2 == 0:
            walk.append(pool(name, stage, entry, walk[-1].output, out_of(entry, NHWC)))
            continue
        layout = Layout(channels_last=True, grid_at=into(entry, NHWC))
        for place, block in enumerate(entry):
            walk += _swin_block(f"{name}.{place}", stage, block, layout)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _swin_block(name: str, stage: int, block: Any, layout: Layout) -> Iterator[Unit]:
    if is_extra(block):
        return extra_step(name, stage, block, layout)
    post_norm = type(block).__name__ == "SwinTransformerBlockV2"
    between = into(block.mlp if post_norm else block.norm2, layout)
    # Both steps share one stochastic depth, in this order.
    branches = [out_of(block.stochastic_depth, layout, within=block, call=call) for call in range(2)]
    attention = softmax_attention(block.attn, layout, partial(_windows, block.attn))
    return residual_block(
        name,
        stage,
        [into(block, layout), between, out_of(block, layout)],
        [
            Step("msa", block.attn, block.norm1, branches[0], attention),
            Step("mlp", block.mlp, block.norm2, branches[1], activation=activation_among(block.mlp)),
        ],
    )


def _windows(attention: Any, grid: Size) -> Windows:
    """Return the windows; torchvision decides at each call that an axis with a single window is not shifted."""
    height, width = (
        0 if window >= length else shift
        for window, length, shift in zip(attention.window_size, grid, attention.shift_size, strict=True)
    )
    return Windows(tuple(attention.window_size), (height, width), pad_first=True)


def convnext(network: Any) -> list[Unit]:
    """Return the stem, then stages and pools in turn, with a conv unit per block."""
    walk = [stem(network.features[0], network, out_of(network.features[0]))]
    for index, entry in enumerate(network.features[1:], start=1):
        stage, name = index // 2, f"features.{index}"
        if index % 2 == 0:
            walk.append(pool(name, stage, entry, walk[-1].output, out_of(entry)))
            continue
        for place, block in enumerate(entry):
            if is_smoothing(block):
                walk[-1] = read_after_blur(walk[-1], block)
                continue
            # The block's input is added to the branch in place.
            branch = out_of(block.stochastic_depth, overwritten=True)
            residual = Residual(into(block), branch, out_of(block))
            activation = activation_among(block.block)
            walk.append(conv_unit(f"{name}.{place}", stage, block, residual, activation=activation))
    return [*walk, head(network.classifier, network, walk[-1])]


def _vit_input_size(network: Any) -> tuple[int, int, int]:
    return (image_channels(network), network.image_size, network.image_size)


def _any_input_size(network: Any) -> tuple[int, int, int]:
    return (image_channels(network), 64, 64)


TORCHVISION = (
    Family(
        "torchvision ViT",
        ("torchvision.models.vision_transformer.VisionTransformer",),
        vit,
        _vit_input_size,
    ),
    Family("torchvision Swin", ("torchvision.models.swin_transformer.SwinTransformer",), swin, _any_input_size),
    Family("torchvision ConvNeXt", ("torchvision.models.convnext.ConvNeXt",), convnext, _any_input_size),
)
