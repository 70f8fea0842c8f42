"""Convolutional stem with scaled ReLU instead of the patchify stem [wang2022, Conv-stem; Tables 2, 3, 5].

Shapes: B images, C image channels, D the network's width, H x W pixels, h x w the token grid; x_bchw is [B, C, H, W].
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator
from timm.models.volo import PatchEmbed as VoloStem
from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import examine, missing, run_once
from vitclinic.treatments.stems import Act, Pair, PoolingStem, ResidualStem, Stem, activation
from vitclinic.treatments.surgery import check_untouched
from vitclinic.treatments.treatment import Treatment, register

Components = Literal[
    "3Conv+3BN+3ReLU+1Proj",
    "3Conv+3BN+1Proj",
    "3Conv+3ReLU+1Proj",
    "3Conv+1Proj",
    "3Conv+1Proj+1ReLU",
    "1Proj+1BN+1ReLU",
    "1Proj+1ReLU",
    "1Proj",
]
"""The rows of Table 2, in the paper's notation. Layers after 1Proj follow the projection."""

FULL: Components = "3Conv+3BN+3ReLU+1Proj"
Preset = Literal["paper", "small", "residual"]
Four = tuple[int, int, int, int]
KERNELS = (7, 3, 3)


class ConvStem(Stem):
    """Convolutional stem from images [B, C, H, W] to features [B, D, h, w], on the grid of the stem it replaces.

    The full stem is 3 x (Conv + BatchNorm + ReLU) + 1 projection [wang2022]. For patch size 16 its kernels are
    (7, 3, 3, 8) and its strides (2, 1, 1, 8); other even patch sizes p have (2, 1, 1, p/2) and a projection of kernel
    p/2. If the replaced convolution overlaps (PiT: kernel 16, stride 8), the projection overlaps in the same
    proportion. A convolution has a bias unless BatchNorm follows it.

    Args:
        channels: Image channels C.
        width: Width D of the network.
        kernel: Kernel of the patch convolution it replaces.
        stride: Stride of that convolution.
        components: A row of Table 2, in the paper's notation.
        act: The activation used for `ReLU`.
        strides: Strides of the four convolutions; derived from `stride` unless given.
        hidden: Channels of the first three convolutions.
        bias: Give the projection a bias (unless BatchNorm follows it).

    Raises:
        TreatmentError: `strides` do not multiply to `stride`.

    Example:
        >>> stem = ConvStem(3, 384, kernel=(16, 16), stride=(16, 16))
        >>> sum(parameter.numel() for parameter in stem.parameters())
        1656768
        >>> import torch
        >>> stem(torch.zeros(1, 3, 32, 48)).shape
        torch.Size([1, 384, 2, 3])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        kernel: Pair,
        stride: Pair,
        *,
        components: Components = FULL,
        act: Act = "relu",
        strides: Four | None = None,
        hidden: int = 64,
        bias: bool = True,
    ) -> None:
        super().__init__(channels, kernel, stride)
        before, after = components.split("1Proj")
        geometry = [(size, step, 0) for size, step in zip(kernel, stride, strict=True)]
        entering = channels
        if before:
            by_axis = [_strides(step, strides) for step in stride]
            for place, size in enumerate(KERNELS):
                steps = (by_axis[0][place], by_axis[1][place])
                conv = nn.Conv2d(entering, hidden, size, steps, size // 2, bias="BN" not in before)
                self._append(f"{place + 1}", conv, before, act)
                entering = hidden
            geometry = [_projection(size, four) for size, four in zip(kernel, by_axis, strict=True)]
        sizes, steps, paddings = (cast(Pair, pair) for pair in zip(*geometry, strict=True))
        proj = nn.Conv2d(entering, width, sizes, steps, paddings, bias=bias and "BN" not in after)
        self._append("", proj, after, act)

    def _append(self, place: str, conv: nn.Conv2d, followed_by: str, act: Act) -> None:
        self.layers.add_module(f"conv{place}" if place else "proj", conv)
        if "BN" in followed_by:
            self.layers.add_module(f"norm{place}", nn.BatchNorm2d(conv.out_channels))
        if "ReLU" in followed_by:
            self.layers.add_module(f"act{place}", activation(act))


def _strides(total: int, given: Four | None) -> Four:
    """Return the four strides for a total stride: those given, or (2, 1, 1, total / 2); for 16 that is (2, 1, 1, 8).

    An odd total (1 for Swin on CIFAR, 7 in PiT-B) has no factor 2: the three convolutions keep every pixel.
    """
    if given is None:
        return (1, 1, 1, total) if total % 2 else (2, 1, 1, total // 2)
    if math.prod(given) != total:
        raise TreatmentError(
            f"conv_stem: the strides {list(given)} multiply to {math.prod(given)}, but the patch stride of this network"
            f" is {total}; choose four that multiply to it."
        )
    return given


def _projection(kernel: int, strides: Four) -> tuple[int, int, int]:
    """Return (kernel, stride, padding) of the projection along one axis.

    Its kernel is half of the replaced one, whatever the strides: (2, 2, 2, 2) keeps 8. A token is `extent` positions
    wide in its input (never wider than the kernel); the padding makes up the difference, so that the grid stays.
    """
    extent = math.ceil(kernel / math.prod(strides[:3]))
    size = max(kernel // 2, extent)
    if strides[3] == 1 and (size - extent) % 2:  # such a kernel could not be centred on its token
        size += 1
    return size, strides[3], math.ceil((size - extent) / 2)


@register
class ConvStemTreatment(Treatment):
    """The patchify stem replaced by convolutions with BatchNorm and ReLU, on the same token grid [wang2022].

    Attributes:
        preset: The paper's stem, or a tokenizer for small images, after CCT or of residual blocks.
        components: A row of Table 2, in the paper's notation.
        act: The activation used for `ReLU`.
        strides: Strides of the four convolutions; derived from the patch stride unless given.
        hidden: Channels of the first three convolutions.
    """

    name: ClassVar[str] = "conv_stem"
    paper: ClassVar[str] = "wang2022, Conv-stem, Tables 1-3"
    changes: ClassVar[str] = "the patchify stem becomes 3 x (Conv + BatchNorm + ReLU) + 1 projection"
    costs: ClassVar[str] = (
        "DeiT-Small: 22.05 M parameters become 23.41 M; 1.29 G multiply-adds more an image of 224 x 224"
    )
    part: ClassVar[str] = "a convolution that cuts the image into patches"

    preset: Preset = Field(
        "paper",
        description="paper: the stem of the paper; for images of 16 to 64 pixels also small (convolutions and"
        " max-pooling, as in CCT) and residual (a convolution, two residual blocks and a projection)",
    )
    components: Components = Field(
        "3Conv+3BN+3ReLU+1Proj", description="a row of Table 2, in the paper's notation; only for preset=paper"
    )
    act: Literal["relu", "gelu"] = Field("relu", description="activation used for ReLU")
    strides: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=4, max_length=4)] | None = Field(
        None,
        description="strides of the four convolutions, multiplying to the patch stride p; by default [2, 1, 1, p/2];"
        " only for preset=paper",
    )
    hidden: int = Field(
        64, ge=1, description="channels of the convolutions before the projection; not for preset=small"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> ConvStemTreatment:
        idle = {"components": self.components != FULL, "strides": self.strides is not None}
        idle["hidden"] = self.preset == "small" and self.hidden != 64
        for option, given in idle.items():
            if given and self.preset != "paper":
                raise ValueError(f"{option} has no effect with preset {self.preset}: remove one of the two")
        if self.act != "relu" and "ReLU" not in self.components:
            raise ValueError(f"act {self.act} has no effect: {self.components} has no ReLU")
        if self.strides is None:
            return self
        if self.components.startswith("1Proj"):
            raise ValueError(f"{self.components} has one convolution with the network's own stride: remove strides")
        if any(step > size for step, size in zip(self.strides, KERNELS, strict=False)):
            raise ValueError(f"strides {self.strides} skip pixels: the kernels of the first three layers are {KERNELS}")
        return self

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        volo = next((unit.module for unit in anatomy.of_kind("stem") if isinstance(unit.module, VoloStem)), None)
        convs = [part for part in volo.modules() if isinstance(part, nn.Conv2d)] if volo is not None else []
        convs = convs or [self._patch_convolution(network, spec)]
        for conv in convs:
            check_untouched(self.name, conv, "the stem's convolution")
        first, last = convs[0], convs[-1]
        stride = cast(Pair, tuple(math.prod(conv.stride[axis] for conv in convs) for axis in (0, 1)))
        kernel = stride if volo is not None else cast(Pair, first.kernel_size)
        made = self._build(first.in_channels, last.out_channels, kernel, stride, bias=last.bias is not None)
        network.set_submodule(anatomy.path(last), made.to(last.weight).train(last.training))
        if volo is not None:  # the new stem has its own convolutions before the projection
            volo.register_module("conv", None)
        return network

    def _build(self, channels: int, width: int, kernel: Pair, stride: Pair, *, bias: bool) -> Stem:
        if self.preset == "paper":
            strides = None if self.strides is None else cast(Four, tuple(self.strides))
            layers: dict[str, Any] = {"components": self.components, "strides": strides}
            return ConvStem(channels, width, kernel, stride, act=self.act, hidden=self.hidden, bias=bias, **layers)
        if kernel != stride:
            raise TreatmentError(
                f"conv_stem: preset {self.preset} needs patches side by side, but those of this network overlap (kernel"
                f" {kernel}, stride {stride}); use preset paper."
            )
        if self.preset == "small":
            return PoolingStem(channels, width, stride, act=self.act)
        return ResidualStem(channels, width, stride, act=self.act, hidden=self.hidden, bias=bias)

    def _patch_convolution(self, network: nn.Module, spec: ImageSpec) -> nn.Conv2d:
        """Return the convolution that sees the image first, if that one cuts it into patches."""
        seen: list[tuple[str, nn.Module]] = []
        handles = [
            module.register_forward_pre_hook(lambda module, _, name=name: seen.append((name, module)))
            for name, module in network.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
        ]
        try:
            run_once(network, spec)
        finally:
            for handle in handles:
                handle.remove()
        if not seen:
            raise missing(self, network)
        name, conv = seen[0]
        if not isinstance(conv, nn.Conv2d):
            raise missing(self, network, f"the image first meets {name}, a {type(conv).__name__}")
        if not _cuts_patches(conv):
            size, step, pad = conv.kernel_size, conv.stride, conv.padding
            raise missing(self, network, f"{name} has kernel {size}, stride {step} and padding {pad}")
        return conv


def _cuts_patches(conv: nn.Conv2d) -> bool:
    """Return True if the kernels lie side by side, or overlap by half (PiT), without padding."""
    side_by_side = conv.kernel_size == conv.stride
    by_half = conv.kernel_size == tuple(2 * step for step in conv.stride) and min(conv.stride) > 2
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding in ((0, 0), "valid")
    return plain and (side_by_side or by_half)
