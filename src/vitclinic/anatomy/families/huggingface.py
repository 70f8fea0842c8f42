"""Hugging Face's ViT, DeiT and Swin, of transformers 4 and 5, neither of which is ever imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    is_extra,
    pool,
    position,
    residual_block,
    softmax_attention,
    stem,
)
from vitclinic.anatomy.maps import Windows
from vitclinic.anatomy.sites import OFF_GRID, Layout, Site, Size, into, out_of
from vitclinic.anatomy.units import Unit


def vit(network: Any) -> list[Unit]:
    """Return stem, position, and an MSA and an MLP per block; DeiT also has a distillation token."""
    body, prefix = _body(network)
    embeddings = body.embeddings
    grid = out_of(embeddings.patch_embeddings.projection)
    special = 2 if hasattr(embeddings, "distillation_token") else 1
    patches, own = Layout(grid_at=grid), Layout(prefix=special, grid_at=grid)
    tokens = replace(own, prefix=count_prefix(network, special))
    walk = [stem(embeddings.patch_embeddings, network, out_of(embeddings.patch_embeddings, patches))]
    after = out_of(embeddings.dropout, own)
    walk.append(position(embeddings.position_embeddings, embeddings.dropout, walk[-1].output, after))
    layers, blocks = ("layers", body.layers) if hasattr(body, "layers") else ("encoder.layer", body.encoder.layer)
    for index, block in enumerate(blocks):
        walk += _block(f"{prefix}{layers}.{index}", 0, block, tokens)
    classifier = getattr(network, "classifier", body.layernorm)
    return [*walk, head(classifier, network, walk[-1], body.layernorm)]


def swin(network: Any) -> list[Unit]:
    """Return stem, position (if absolute), pools, and an MSA and an MLP per block; all as [B, N, C]."""
    body, prefix = _body(network)
    embeddings = body.embeddings
    patches = Layout(grid_at=out_of(embeddings.patch_embeddings.projection))
    walk = [stem(embeddings.patch_embeddings, network, out_of(embeddings.norm, patches))]
    if embeddings.position_embeddings is not None:
        after = out_of(embeddings.dropout, patches)
        walk.append(position(embeddings.position_embeddings, embeddings.dropout, walk[-1].output, after))
    for stage, layer in enumerate(body.encoder.layers):
        name = f"{prefix}encoder.layers.{stage}"
        # Blocks are handed the size of their grid beside its tokens.
        layout = Layout(grid_at=into(layer.blocks[0], item=1))
        if stage > 0:
            merging = body.encoder.layers[stage - 1].downsample
            walk.append(pool(name, stage, merging, walk[-1].output, out_of(merging, layout)))
        for index, block in enumerate(layer.blocks):
            walk += _block(f"{name}.blocks.{index}", stage, block, layout, partial(_windows, block))
    classifier = getattr(network, "classifier", body.layernorm)
    return [*walk, head(classifier, network, walk[-1], body.layernorm)]


def _body(network: Any) -> tuple[Any, str]:
    """Return the model inside a task's network, and the prefix of its names."""
    body = network.base_model
    return body, "" if body is network else f"{network.base_model_prefix}."


def _block(
    name: str, stage: int, block: Any, layout: Layout, windows: Callable[[Size], Windows] | None = None
) -> Iterator[Unit]:
    if is_extra(block):
        return extra_step(name, stage, block, layout)
    attention = softmax_attention(block.attention, layout, windows)
    msa, mlp = _branches(block, layout)
    return residual_block(
        name,
        stage,
        [into(block, layout), into(block.layernorm_after, layout), out_of(block, layout)],
        [
            Step("msa", block.attention, block.layernorm_before, msa, attention),
            Step("mlp", _mlp(block), block.layernorm_after, mlp, activation=_activation(_mlp(block))),
        ],
    )


def _mlp(block: Any) -> Any:
    """Return the MLP or, in transformers 4, which has no module for all of it, its first half."""
    return getattr(block, "mlp", None) or block.intermediate


def _activation(mlp: Any) -> Site | None:
    """Return the site after the activation: `activation_fn` in transformers 5; in 4, the end of the first half."""
    act = getattr(mlp, "activation_fn", None)
    if isinstance(act, nn.Module):
        return out_of(act, OFF_GRID)
    return out_of(mlp, OFF_GRID) if hasattr(mlp, "intermediate_act_fn") else None


def _branches(block: Any, layout: Layout) -> tuple[Site, Site]:
    """Return where the two branches end; Swin's attention leaves its windows only at the drop_path."""
    windowed = hasattr(block, "drop_path")
    if hasattr(block, "mlp"):  # transformers 5: both steps share one dropout, in this order
        msa, mlp = (out_of(block.dropout, layout, within=block, call=call) for call in range(2))
    else:  # transformers 4: ViT's `output` has the residual inside, behind its dropout
        msa = out_of(block.attention.output, layout)
        mlp = out_of(block.output if windowed else block.output.dropout, layout)
    return out_of(block.drop_path, layout) if windowed else msa, mlp


def _windows(block: Any, grid: Size) -> Windows:
    # The block fits both to its grid before it calls its attention.
    return Windows((block.window_size,) * 2, (block.shift_size,) * 2, pad_first=True)


def input_size(network: Any) -> tuple[int, int, int]:
    """Return the image size in the network's configuration."""
    size = network.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return (network.config.num_channels, height, width)


_MODELS = "transformers.models"
HUGGINGFACE = (
    Family("Hugging Face ViT", (f"{_MODELS}.vit.modeling_vit.ViTPreTrainedModel",), vit, input_size),
    Family("Hugging Face DeiT", (f"{_MODELS}.deit.modeling_deit.DeiTPreTrainedModel",), vit, input_size),
    Family("Hugging Face Swin", (f"{_MODELS}.swin.modeling_swin.SwinPreTrainedModel",), swin, input_size),
)
