"""Convolutional networks: ResNet and ResNeXt, timm's and torchvision's, timm's ConvNeXt; our ResNet and AlterNet.

Of vitclinic's pre-activation ResNet and AlterNet there is one conv or MSA unit per block; the MSA blocks of any ResNet
are read alike.
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
    softmax_attention,
    stem,
    unknown_block,
)
from vitclinic.anatomy.maps import Windows
from vitclinic.anatomy.removal import Bypass, Silence
from vitclinic.anatomy.sites import NHWC, Layout, Site, Size, into, out_of
from vitclinic.anatomy.units import Residual, Unit

_PRE_ACTIVATION = ("PreActBasicBlock", "PreActBottleneck")


def preact_units(network: Any) -> list[Unit]:
    """Return the stem (with its max-pooling) and a unit per block; stages subsample in their first block."""
    walk = [stem(network.conv1, network, out_of(network.maxpool))]
    for stage in range(4):
        for index, block in enumerate(network.stage(stage)):
            name = f"layer{stage + 1}.{index}"
            if type(block).__name__ == "MsaBlock":
                walk.append(msa_unit(name, stage, block, out_of(block.drop_path), out_of(block)))
            elif is_smoothing(block):
                walk[-1] = read_after_blur(walk[-1], block)
            elif type(block).__name__ in _PRE_ACTIVATION:
                walk.append(_preact_conv(name, stage, block))
            else:
                raise unknown_block(name, block)
    return [*walk, head(network.fc, network, walk[-1], network.norm)]


def _preact_conv(name: str, stage: int, block: Any) -> Unit:
    skip = into(block) if block.downsample is None else out_of(block.downsample)
    bottleneck = type(block).__name__ == "PreActBottleneck"
    removal = Bypass(block.conv2) if bottleneck else None
    activation = out_of(block.act3 if bottleneck else block.act2)
    residual = Residual(skip, out_of(block.drop_path), out_of(block))
    return conv_unit(name, stage, block, residual, removal, activation=activation)


def msa_unit(name: str, stage: int, block: Any, branch: Site, total: Site) -> Unit:
    """Return the unit of an MSA block in a ResNet, with all layers of the block; its attention is windowed."""
    keys = Layout(channels_last=True, grid_at=into(block.attn, NHWC))
    return Unit(
        name=f"{name}.msa",
        kind="msa",
        stage=stage,
        module=block,
        block=name,
        input=into(block),
        output=out_of(block),
        residual=Residual(into(block), branch, total),
        removal=Silence(branch),
        attention=softmax_attention(block.attn, keys, partial(_windows, block.attn)),
    )


def _windows(attention: Any, grid: Size) -> Windows:
    # A window is never longer than the grid's side.
    return Windows((min(attention.window, grid[0]), min(attention.window, grid[1])))


def preact_input_size(network: Any) -> tuple[int, int, int]:
    """Return a size, as any will do: small if the stem does not subsample."""
    side = 32 if network.conv1.stride == (1, 1) else 64
    return (image_channels(network), side, side)


PREACT_RESNET = Family(
    "vitclinic pre-activation ResNet", ("vitclinic.models.preact_resnet.PreActResNet",), preact_units, preact_input_size
)
ALTERNET = Family("vitclinic AlterNet", ("vitclinic.models.alternet.AlterNet",), preact_units, preact_input_size)


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
