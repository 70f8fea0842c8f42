"""Hugging Face's ViT, DeiT and Swin (transformers 5), recognised by name: transformers is never imported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from vitclinic.anatomy.families.building import Step, head, pool, position, residual_block, stem
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import Layout, Site, Size, into, out_of
from vitclinic.anatomy.units import AttentionSpec, Unit
from vitclinic.anatomy.windows import Windows
from vitclinic.errors import AnatomyError


def vit(network: Any) -> list[Unit]:
    """Stem, position, and an MSA and an MLP per block; DeiT has a distillation token too."""
    body, prefix = _body(network)
    if not hasattr(body, "layers"):
        raise AnatomyError(
            f"{type(network).__name__} is laid out as before transformers 5; install transformers>=5."
        )
    embeddings = body.embeddings
    grid = out_of(embeddings.patch_embeddings.projection)
    special = 2 if hasattr(embeddings, "distillation_token") else 1
    patches, tokens = Layout(grid_at=grid), Layout(prefix=special, grid_at=grid)
    walk = [stem(embeddings.patch_embeddings, network, out_of(embeddings.patch_embeddings, patches))]
    after = out_of(embeddings.dropout, tokens)
    walk.append(position(embeddings.position_embeddings, embeddings.dropout, walk[-1].output, after))
    for index, block in enumerate(body.layers):
        # Both steps share one dropout, in this order.
        branches = [out_of(block.dropout, tokens, within=block, call=call) for call in range(2)]
        attention = AttentionSpec(block.attention, tokens)
        walk += _block(f"{prefix}layers.{index}", 0, block, tokens, branches, attention)
    classifier = getattr(network, "classifier", body.layernorm)
    return [*walk, head(classifier, network, walk[-1], body.layernorm)]


def swin(network: Any) -> list[Unit]:
    """Stem, position (if it is absolute), and a pool after each stage but the last; all states are [B, N,
    C]."""
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
            # The dropout's first call is inside the windows of the attention.
            branches = [out_of(block.drop_path, layout), out_of(block.dropout, layout, within=block, call=1)]
            attention = AttentionSpec(block.attention, layout, partial(_windows, block))
            walk += _block(f"{name}.blocks.{index}", stage, block, layout, branches, attention)
    classifier = getattr(network, "classifier", body.layernorm)
    return [*walk, head(classifier, network, walk[-1], body.layernorm)]


def _body(network: Any) -> tuple[Any, str]:
    """The model inside a task's network, and the prefix of its names."""
    body = network.base_model
    return body, "" if body is network else f"{network.base_model_prefix}."


def _block(
    name: str, stage: int, block: Any, layout: Layout, branches: list[Site], attention: AttentionSpec
) -> Iterator[Unit]:
    return residual_block(
        name,
        stage,
        [into(block, layout), into(block.layernorm_after, layout), out_of(block, layout)],
        [
            Step("msa", block.attention, block.layernorm_before, branches[0], attention),
            Step("mlp", block.mlp, block.layernorm_after, branches[1]),
        ],
    )


def _windows(block: Any, grid: Size) -> Windows:
    # The block fits both to its grid before it calls its attention.
    return Windows((block.window_size,) * 2, (block.shift_size,) * 2, pad_first=True)


def input_size(network: Any) -> tuple[int, int, int]:
    """The size in the network's configuration."""
    size = network.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return (network.config.num_channels, height, width)


_MODELS = "transformers.models"
HUGGINGFACE = (
    Family("Hugging Face ViT", (f"{_MODELS}.vit.modeling_vit.ViTPreTrainedModel",), vit, input_size),
    Family("Hugging Face DeiT", (f"{_MODELS}.deit.modeling_deit.DeiTPreTrainedModel",), vit, input_size),
    Family("Hugging Face Swin", (f"{_MODELS}.swin.modeling_swin.SwinPreTrainedModel",), swin, input_size),
)
