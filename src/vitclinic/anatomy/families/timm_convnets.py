"""Convolutional networks: ResNet and ResNeXt, timm's and torchvision's, and timm's ConvNeXt; one conv unit per block.

A ResNet's post-activation block computes relu(skip + branch): the residual is checked before that activation and the
unit's output read after it. Both libraries add in place, so branch and sum are overwritten by the network
itself. Removing a bottleneck replaces its 3 x 3 conv by the identity, or by subsampling if it has a stride
[park2022]; a basic block, where no conv can be left out alone in general, has its branch set to zero. Blocks that
vitclinic's build-up rule has turned into MSA blocks are MSA units.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from vitclinic.anatomy.families.family import (
    Family,
    conv_unit,
    head,
    hidden,
    image_channels,
    is_smoothing,
    pool,
    read_after_blur,
    stem,
    unknown_block,
)
from vitclinic.anatomy.families.preact_resnet import msa_unit
from vitclinic.anatomy.removal import Bypass
from vitclinic.anatomy.sites import Site, into, out_of
from vitclinic.anatomy.units import Residual, Unit

_CONVS = {"BasicBlock": 2, "Bottleneck": 3}


def resnet_units(network: Any, *, shared_activation: bool) -> list[Unit]:
    """Return the stem (with its max-pooling) and a conv unit per block; stages subsample in their first block."""
    walk = [stem(network.conv1, network, out_of(network.maxpool))]
    for stage in range(4):
        for index, block in enumerate(getattr(network, f"layer{stage + 1}")):
            name = f"layer{stage + 1}.{index}"
            if type(block).__name__ == "PostActMsaBlock":
                walk.append(msa_unit(name, stage, block, out_of(block.drop_path), into(block.act)))
                continue
            if is_smoothing(block):
                walk[-1] = read_after_blur(walk[-1], block)
                continue
            if type(block).__name__ not in _CONVS:
                raise unknown_block(name, block)
            residual = Residual(_resnet_skip(block), _resnet_branch(block), _resnet_total(block, shared_activation))
            activation = _resnet_activation(block, shared_activation)
            walk.append(conv_unit(name, stage, block, residual, _resnet_removal(block), activation=activation))
    return [*walk, head(network.fc, network, walk[-1])]


def _resnet_skip(block: Any) -> Site:
    return into(block) if block.downsample is None else out_of(block.downsample)


def _resnet_branch(block: Any) -> Site:
    norm = getattr(block, f"bn{_CONVS[type(block).__name__]}")
    later = [getattr(block, name, None) for name in ("drop_path", "se")]
    return out_of(next((module for module in later if module is not None), norm), overwritten=True)


def _resnet_total(block: Any, shared_activation: bool) -> Site:
    convs = _CONVS[type(block).__name__]
    if shared_activation:  # torchvision: the last call of the block's one ReLU follows the addition
        return into(block.relu, within=block, call=convs - 1, overwritten=True)
    return into(getattr(block, f"act{convs}"), overwritten=True)


def _resnet_activation(block: Any, shared_activation: bool) -> Site:
    """Return the site after the last activation inside the branch; the block's last one follows the addition."""
    before = _CONVS[type(block).__name__] - 1
    if shared_activation:
        return out_of(block.relu, within=block, call=before - 1)
    return out_of(getattr(block, f"act{before}"))


def _resnet_removal(block: Any) -> Bypass | None:
    conv: nn.Conv2d = block.conv2
    bypassable = type(block).__name__ == "Bottleneck" and conv.in_channels == conv.out_channels
    return Bypass(conv) if bypassable else None


def resnet_input_size(network: Any) -> tuple[int, int, int]:
    """Return a small size, as any will do."""
    return (image_channels(network), 64, 64)


RESNET = Family(
    "timm ResNet", ("timm.models.resnet.ResNet",), partial(resnet_units, shared_activation=False), resnet_input_size
)
TORCHVISION_RESNET = Family(
    "torchvision ResNet",
    ("torchvision.models.resnet.ResNet",),
    partial(resnet_units, shared_activation=True),
    resnet_input_size,
)


def convnext_units(network: Any) -> list[Unit]:
    """Return the stem and, per stage, a pool (if the grid or the width changes) and a conv unit per block."""
    walk = [stem(network.stem, network, out_of(network.stem))]
    for stage, layer in enumerate(network.stages):
        name = f"stages.{stage}"
        if not isinstance(layer.downsample, nn.Identity):
            walk.append(pool(name, stage, layer.downsample, walk[-1].output, out_of(layer.downsample)))
        for index, block in enumerate(layer.blocks):
            if is_smoothing(block):
                walk[-1] = read_after_blur(walk[-1], block)
                continue
            residual = Residual(out_of(block.shortcut), out_of(block.drop_path), out_of(block))
            walk.append(conv_unit(f"{name}.blocks.{index}", stage, block, residual, activation=hidden(block.mlp)))
    return [*walk, head(network.head, network, walk[-1], network.norm_pre)]


def convnext_input_size(network: Any) -> tuple[int, int, int]:
    """Return a small multiple of the total stride, as any will do."""
    return (image_channels(network), 64, 64)


CONVNEXT = Family("timm ConvNeXt", ("timm.models.convnext.ConvNeXt",), convnext_units, convnext_input_size)
