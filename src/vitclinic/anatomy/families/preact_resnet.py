"""vitclinic's pre-activation ResNet and AlterNet: one conv or MSA unit per block, and the MSA blocks of any ResNet.

A block adds without an activation behind it, so its output is the sum. Removing a bottleneck replaces its 3 x 3 conv,
as in ResNet [park2022]; a basic block and an MSA have their branch set to zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vitclinic.anatomy.families.family import (
    Family,
    conv_unit,
    head,
    image_channels,
    is_smoothing,
    read_after_blur,
    softmax_attention,
    stem,
    unknown_block,
)
from vitclinic.anatomy.removal import Bypass, Silence
from vitclinic.anatomy.sites import NHWC, Layout, Site, Size, into, out_of
from vitclinic.anatomy.units import Residual, Unit
from vitclinic.anatomy.windows import Windows

_CONVS = ("PreActBasicBlock", "PreActBottleneck")


def units(network: Any) -> list[Unit]:
    """Return the stem (with its max-pooling) and a unit per block; stages subsample in their first block."""
    walk = [stem(network.conv1, network, out_of(network.maxpool))]
    for stage in range(4):
        for index, block in enumerate(network.stage(stage)):
            name = f"layer{stage + 1}.{index}"
            if type(block).__name__ == "MsaBlock":
                walk.append(msa_unit(name, stage, block, out_of(block.drop_path), out_of(block)))
            elif is_smoothing(block):
                walk[-1] = read_after_blur(walk[-1], block)
            elif type(block).__name__ in _CONVS:
                walk.append(_conv(name, stage, block))
            else:
                raise unknown_block(name, block)
    return [*walk, head(network.fc, network, walk[-1], network.norm)]


def _conv(name: str, stage: int, block: Any) -> Unit:
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


def input_size(network: Any) -> tuple[int, int, int]:
    """Return a size, as any will do: small if the stem does not subsample."""
    side = 32 if network.conv1.stride == (1, 1) else 64
    return (image_channels(network), side, side)


PREACT_RESNET = Family(
    "vitclinic pre-activation ResNet", ("vitclinic.models.preact_resnet.PreActResNet",), units, input_size
)
ALTERNET = Family("vitclinic AlterNet", ("vitclinic.models.alternet.AlterNet",), units, input_size)
