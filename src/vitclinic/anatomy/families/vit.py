"""timm's ViT and DeiT: class, distillation and register tokens, pre-norm and residual post-norm blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitclinic.anatomy.families.building import (
    Step,
    head,
    hidden,
    image_channels,
    position,
    residual_block,
    softmax_attention,
    stem,
    transformer_block,
    unknown_block,
)
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import Layout, into, out_of
from vitclinic.anatomy.units import Kind, Unit

_POST_NORM = {"Block": False, "ResPostBlock": True}
_ONE_STEP: dict[str, Kind] = {"MsaBlock": "msa", "MlpBlock": "mlp"}
"""The blocks that the treatment `extra_block` adds, each an attention or an MLP alone."""


def units(network: Any) -> list[Unit]:
    """Stem, position (if it is learned), and an MSA and an MLP per block."""
    # Channels last with `dynamic_img_size`, tokens otherwise; the grid is what the patch projection gives.
    patches = Layout(channels_last=True, grid_at=out_of(network.patch_embed.proj))
    has_class = network.cls_token is not None  # some have registers and no class token
    tokens = Layout(prefix=network.num_prefix_tokens, grid_at=patches.grid_at, has_class=has_class)
    walk = [stem(network.patch_embed, network, out_of(network.patch_embed, patches))]
    if network.pos_embed is not None:
        after = out_of(network.pos_drop, tokens)
        walk.append(position(network.pos_embed, network.pos_drop, walk[-1].output, after))
    for index, block in enumerate(network.blocks):
        name, kind = f"blocks.{index}", type(block).__name__
        if kind in _ONE_STEP:
            walk += _one_step(name, block, tokens)
            continue
        if kind not in _POST_NORM:
            raise unknown_block(name, block)
        attention = softmax_attention(block.attn, tokens)
        walk += transformer_block(name, 0, block, tokens, attention=attention, post_norm=_POST_NORM[kind])
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _one_step(name: str, block: Any, tokens: Layout) -> Iterator[Unit]:
    kind = _ONE_STEP[type(block).__name__]
    branch = out_of(block.drop_path, tokens)
    if kind == "msa":
        step = Step(kind, block.attn, block.norm, branch, softmax_attention(block.attn, tokens))
    else:
        step = Step(kind, block.mlp, block.norm, branch, activation=hidden(block.mlp))
    return residual_block(name, 0, [into(block, tokens), out_of(block, tokens)], [step])


def input_size(network: Any) -> tuple[int, int, int]:
    """The size the position embedding was made for."""
    return (image_channels(network), *network.patch_embed.img_size)


VIT = Family("timm ViT", ("timm.models.vision_transformer.VisionTransformer",), units, input_size)
