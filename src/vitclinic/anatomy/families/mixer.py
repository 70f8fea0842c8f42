"""timm's MLP-Mixer, ResMLP and gMLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vitclinic.anatomy.families.building import (
    Step,
    head,
    hidden,
    image_channels,
    residual_block,
    stem,
    unknown_block,
)
from vitclinic.anatomy.families.registry import Family
from vitclinic.anatomy.sites import Layout, into, out_of
from vitclinic.anatomy.units import Unit


def units(network: Any) -> list[Unit]:
    """Stem, then a token-MLP and an MLP per block (gMLP: one token-MLP, which does both)."""
    tokens = Layout(grid_at=out_of(network.stem.proj))
    walk = [stem(network.stem, network, out_of(network.stem, tokens))]
    for index, block in enumerate(network.blocks):
        walk += _block(f"blocks.{index}", block, tokens)
    return [*walk, head(network.head, network, walk[-1], network.norm)]


def _block(name: str, block: Any, tokens: Layout) -> Iterator[Unit]:
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


def input_size(network: Any) -> tuple[int, int, int]:
    """The size the token-mixing weights were made for."""
    return (image_channels(network), *network.stem.img_size)


MIXER = Family("timm MLP-Mixer", ("timm.models.mlp_mixer.MlpMixer",), units, input_size)
