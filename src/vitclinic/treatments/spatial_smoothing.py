"""Spatial smoothing: a 2 x 2 blur at the end of every stage of a CNN."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import examine, missing
from vitclinic.treatments.treatment import Treatment, register


def blur(x_bchw: Tensor) -> Tensor:
    """Return the mean over 2 x 2 windows with stride 1; the last row and column are repeated at the border."""
    for axis in (-2, -1):
        last = x_bchw.narrow(axis, x_bchw.shape[axis] - 1, 1)
        # Slices instead of replicate padding, whose gradient is not deterministic on GPUs.
        following = torch.cat((x_bchw.narrow(axis, 1, x_bchw.shape[axis] - 1), last), dim=axis)
        x_bchw = (x_bchw + following) / 2
    return x_bchw


class Blur(nn.Module):
    """A 2 x 2 box blur with stride 1: y[i, j] = (x[i, j] + x[i+1, j] + x[i, j+1] + x[i+1, j+1]) / 4.

    The last row and column are repeated at the border, so the size stays the same and a constant map is unchanged. It
    has no parameters.

    Example:
        >>> Blur()(torch.tensor([[[[0.0, 4.0], [8.0, 0.0]]]]))
        tensor([[[[3., 2.],
                  [4., 0.]]]])
    """

    def forward(self, x_bchw: Tensor) -> Tensor:
        return blur(x_bchw)


@register
class SpatialSmoothing(Treatment):
    """A blur after the last block of each stage: the smoothing that attention does, without training [park2022]."""

    name: ClassVar[str] = "spatial_smoothing"
    paper: ClassVar[str] = "park2022 Fig. 3a, App. B"
    changes: ClassVar[str] = "a 2 x 2 blur at the end of every stage of a CNN"
    costs: ClassVar[str] = "no parameters; a few passes over the output of each stage"
    part: ClassVar[str] = "stages of convolutional blocks, each in an nn.Sequential"

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        if not anatomy.of_kind("conv"):
            raise missing(self, network)
        last_blocks = {block.stage: block.name for block in anatomy.blocks}
        stages = [network.get_submodule(name.rpartition(".")[0]) for name in last_blocks.values()]
        for name, stage in zip(last_blocks.values(), stages, strict=True):
            if not isinstance(stage, nn.Sequential) or stage[-1] is not network.get_submodule(name):
                raise missing(self, network, f"{name} is in a {type(stage).__name__}")
        for stage in stages:
            stage.append(Blur())  # type: ignore[operator]
        return network
