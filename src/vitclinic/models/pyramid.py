"""Feature pyramids: maps of a backbone at four strides, for heads that look at an image finely and coarsely.

A hierarchical network gives its stages as they are; what is missing below them is learned. A plain one has tokens on
one grid: those of four depths are brought to strides 4, 8, 16 and 32 by learned up- and down-sampling [hyeonwoo2023
4.3; Li et al., ViTDet, ECCV 2022]. Sites and grids are those of the anatomy, so that any network that has one serves.

Shapes: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy, Unit, eval_mode, taps
from vitclinic.anatomy.sites import Site, onto_grid
from vitclinic.anatomy.units import Kind
from vitclinic.anatomy.wrappers import call_with_images
from vitclinic.data import ImageSpec
from vitclinic.models.headed import Headed

LEVELS = 4
FINEST = 4
"""Stride of the finest map of a plain network, unless its patches are finer."""
_FEATURES: tuple[Kind, ...] = ("msa", "mlp", "token_mlp", "conv")


class Pyramid(nn.Module):
    """Four maps of a backbone, each about twice as coarse as the one before.

    Args:
        backbone: The network whose states are read; it is not a part of the pyramid.
        spec: The images it takes.

    Attributes:
        channels: Channels of each map, from the finest to the coarsest.
        strides: Pixels of the image, down and across, that one place of each map stands for.

    Raises:
        ModelError: The network has no features on a grid.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=0)
        >>> pyramid = Pyramid(vit, ImageSpec(7, 3, (64, 64)))
        >>> [tuple(x_bchw.shape[1:]) for x_bchw in pyramid(vit, torch.rand(2, 3, 64, 64))]
        [(192, 16, 16), (192, 8, 8), (192, 4, 4), (192, 2, 2)]
    """

    def __init__(self, backbone: nn.Module, spec: ImageSpec) -> None:
        super().__init__()
        like = next(parameter for parameter in backbone.parameters() if parameter.is_floating_point())
        noise = torch.rand(1, spec.in_chans, *spec.img_size, generator=torch.Generator().manual_seed(0))
        anatomy = Anatomy.of(backbone, noise.to(like))
        units = choose_units(anatomy)
        own = [_stride(anatomy, unit, spec) for unit in units]
        self.sites = tuple(unit.output for unit in units)
        self._own = tuple(own)
        widths = [_channels(anatomy, unit) for unit in units]
        if len({anatomy.output_grid(unit) for unit in units}) > 1:
            self._levels = (*range(len(units)), *[len(units) - 1] * (LEVELS - len(units)))
            factors = [1.0] * len(units) + [0.5**step for step in range(1, LEVELS - len(units) + 1)]
        else:
            self._levels = tuple(range(LEVELS))
            finest = min(FINEST, *own[0])
            factors = [own[0][0] / (finest * 2**level) for level in range(LEVELS)]
        self.resamplers = nn.ModuleList(
            Resampler(widths[level], factor) for level, factor in zip(self._levels, factors, strict=True)
        )
        self.channels = tuple(widths[level] for level in self._levels)
        self.strides = tuple(
            (own[level][0] / factor, own[level][1] / factor)
            for level, factor in zip(self._levels, factors, strict=True)
        )

    def forward(self, backbone: nn.Module, images: Tensor) -> list[Tensor]:
        """Return the maps [B, C, h, w] for images [B, C, H, W], from the finest to the coarsest."""
        with taps(dict(enumerate(self.sites)), grad=True) as seen:
            call_with_images(backbone, images)
        size = (images.shape[2], images.shape[3])
        maps = [self._place(number, site, seen[number], size) for number, site in enumerate(self.sites)]
        return [resample(maps[level]) for resample, level in zip(self.resamplers, self._levels, strict=True)]

    def _place(self, number: int, site: Site, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return features as a map; the grid of flattened ones follows from the size of the images."""
        stride = self._own[number]
        return onto_grid(site.layout, tokens, (round(size[0] / stride[0]), round(size[1] / stride[1])))


def choose_units(anatomy: Anatomy) -> list[Unit]:
    """Return the units whose outputs a pyramid reads: the last of each stage, or of blocks at four depths.

    Example:
        >>> import timm
        >>> [unit.name for unit in choose_units(Anatomy.of(timm.create_model("vit_tiny_patch16_224")))]
        ['blocks.2.mlp', 'blocks.5.mlp', 'blocks.8.mlp', 'blocks.11.mlp']
    """
    found = [unit for unit in anatomy.of_kind(*_FEATURES) if anatomy.output_grid(unit) is not None]
    if not found:
        raise ModelError(f"{anatomy.family} has no features on a grid, from which a dense task could be learned.")
    last_at = {anatomy.output_grid(unit): unit for unit in found}
    if len(last_at) > 1:
        return list(last_at.values())[-LEVELS:]
    ends = [unit for unit in found if unit.block is None]
    ends = ends or list({unit.block: unit for unit in found}.values())
    return [ends[-(-len(ends) * (level + 1) // LEVELS) - 1] for level in range(LEVELS)]


def _stride(anatomy: Anatomy, unit: Unit, spec: ImageSpec) -> tuple[float, float]:
    grid = anatomy.output_grid(unit)
    assert grid is not None
    return spec.img_size[0] / grid[0], spec.img_size[1] / grid[1]


def _channels(anatomy: Anatomy, unit: Unit) -> int:
    channels = anatomy.output_channels(unit)
    assert channels is not None
    return channels


class Resampler(nn.Sequential):
    """Learned resampling of a map by a factor: transposed convolutions upwards, strided ones downwards.

    A factor that is no power of two is interpolated first, and then mixed by a convolution.
    """

    def __init__(self, channels: int, factor: float) -> None:
        power = round(math.log2(factor))
        if not math.isclose(2.0**power, factor, rel_tol=1e-6):
            super().__init__(_Interpolate(factor), nn.Conv2d(channels, channels, 3, padding=1))
            return
        layers: list[nn.Module] = []
        for step in range(abs(power)):
            if step:
                layers += [nn.GroupNorm(1, channels), nn.GELU()]
            if power > 0:
                layers.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
            else:
                layers.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
        super().__init__(*layers)


class _Interpolate(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_bchw: Tensor) -> Tensor:
        size = [max(1, round(side * self.factor)) for side in x_bchw.shape[2:]]
        return F.interpolate(x_bchw, size, mode="bilinear", align_corners=False)


def freeze_unread(network: Headed, spec: ImageSpec) -> None:
    """Take the parameters that do not change the outputs of a head out of training, such as a final norm.

    They would keep several processes waiting for gradients that never come.
    """
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    images = torch.rand(1, spec.in_chans, *spec.img_size, generator=torch.Generator().manual_seed(0)).to(like)
    with torch.enable_grad(), eval_mode(network):
        read = find_leaves(network.outputs(images))
    for parameter in network.parameters():
        if parameter not in read:
            parameter.requires_grad_(False)


def find_leaves(outputs: Iterable[Tensor]) -> set[Tensor]:
    """Return the tensors that gradients of the outputs would be accumulated in, without computing any."""
    ahead: list[Node] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(ahead), set()
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                ahead.append(before)
    return leaves
