"""Stems in place of a patch convolution: what they share, and the two tokenizers for images of 16 to 64 pixels.

Shapes: B images, C image channels, D the network's width, H x W pixels, h x w the token grid; x_bchw is [B, C, H, W].
"""

from __future__ import annotations

import math
from typing import Literal, cast

from torch import Tensor, nn

from vitclinic._core.errors import TreatmentError

Pair = tuple[int, int]
Act = Literal["relu", "gelu"]


def activation(act: Act) -> nn.Module:
    """Build an activation function; a ReLU works in place, as in VOLO: these are the largest maps of the network."""
    return nn.ReLU(inplace=True) if act == "relu" else nn.GELU()


class Stem(nn.Module):
    """Base of all stems: images [B, C, H, W] to features [B, D, h, w], on the grid of the convolution it replaces.

    A subclass fills `layers`, in which `proj` is the last convolution.

    Args:
        channels: Image channels C.
        kernel: Kernel of the patch convolution that it replaces.
        stride: Stride of that convolution.
    """

    is_stem = True
    """Read by the anatomy: one unit, also with residual blocks inside."""

    def __init__(self, channels: int, kernel: Pair, stride: Pair) -> None:
        super().__init__()
        self.in_channels, self.kernel_size, self.stride = channels, kernel, stride
        self.layers = nn.Sequential()

    @property
    def out_channels(self) -> int:
        """The width D, read from the projection, which another treatment may have widened."""
        return cast(nn.Conv2d, self.layers.proj).out_channels

    @property
    def weight(self) -> Tensor:
        """The projection's weight: Hugging Face's networks cast images to the precision of their convolution's."""
        return cast(nn.Conv2d, self.layers.proj).weight

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Return the features, ignoring incomplete patches at the border as the replaced convolution did."""
        height, width = (
            (length - size) // step * step + size
            for length, size, step in zip(x_bchw.shape[-2:], self.kernel_size, self.stride, strict=True)
        )
        features: Tensor = self.layers(x_bchw[..., :height, :width])
        return features


class PoolingStem(Stem):
    """Convolutional tokenizer of the compact transformer CCT (Hassani et al. 2021).

        k x (Conv 3 x 3 + ReLU + MaxPool 3 x 3, stride 2),   k = log2(stride),   channels D / 2^(k-1), ..., D / 2, D

    Convolutions have no bias and start from He's normal distribution, as in CCT.

    Args:
        channels: Image channels C.
        width: Width D of the network.
        stride: Stride of the patch convolution it replaces, a power of two along each axis.
        act: The activation used for `ReLU`.

    Raises:
        TreatmentError: The stride is no power of two.

    Example:
        >>> import torch
        >>> stem = PoolingStem(3, 96, stride=(4, 4))
        >>> sum(parameter.numel() for parameter in stem.parameters())  # 9 * 3 * 48 + 9 * 48 * 96
        42768
        >>> stem(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 96, 8, 8])
    """

    def __init__(self, channels: int, width: int, stride: Pair, *, act: Act = "relu") -> None:
        super().__init__(channels, stride, stride)
        if any(step & (step - 1) for step in stride) or max(stride) < 2:
            raise TreatmentError(
                f"conv_stem: preset small halves the image step by step, but the patch stride of this network is"
                f" {_shown(stride)}; use preset paper, or a patch size that is a power of two."
            )
        stages = int(math.log2(max(stride)))
        for stage in range(stages):
            last = stage == stages - 1
            leaving = width if last else max(1, width >> (stages - 1 - stage))
            conv = nn.Conv2d(channels, leaving, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight)
            self.layers.add_module("proj" if last else f"conv{stage + 1}", conv)
            self.layers.add_module(f"act{stage + 1}", activation(act))
            steps = cast(Pair, tuple(2 if step >> stage > 1 else 1 for step in stride))
            self.layers.add_module(f"pool{stage + 1}", nn.MaxPool2d(3, steps, 1))
            channels = leaving


class ResidualStem(Stem):
    """A stride-2 convolution, two residual blocks, and a projection with what is left of the stride.

        Conv 3 x 3, stride 2 + BN + ReLU,   2 x [ReLU(x + BN Conv ReLU BN Conv x)],   Conv p/2 x p/2, stride p/2

    Args:
        channels: Image channels C.
        width: Width D of the network.
        stride: Stride p of the patch convolution it replaces, even along each axis.
        act: The activation used for `ReLU`.
        hidden: Channels of all convolutions before the projection.
        bias: Give the projection a bias.

    Raises:
        TreatmentError: The stride is odd.

    Example:
        >>> import torch
        >>> ResidualStem(3, 96, stride=(4, 4))(torch.zeros(1, 3, 32, 48)).shape
        torch.Size([1, 96, 8, 12])
    """

    def __init__(
        self, channels: int, width: int, stride: Pair, *, act: Act = "relu", hidden: int = 64, bias: bool = True
    ) -> None:
        super().__init__(channels, stride, stride)
        if any(step % 2 for step in stride):
            raise TreatmentError(
                f"conv_stem: preset residual begins with a stride of 2, but the patch stride of this network is"
                f" {_shown(stride)}; use preset paper, or an even patch size."
            )
        self.layers.add_module("conv1", nn.Conv2d(channels, hidden, 3, 2, 1, bias=False))
        self.layers.add_module("norm1", nn.BatchNorm2d(hidden))
        self.layers.add_module("act1", activation(act))
        self.layers.add_module("block1", ResidualBlock(hidden, act))
        self.layers.add_module("block2", ResidualBlock(hidden, act))
        rest = (stride[0] // 2, stride[1] // 2)
        self.layers.add_module("proj", nn.Conv2d(hidden, width, rest, rest, bias=bias))


class ResidualBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions: ReLU(x + BN Conv ReLU BN Conv x).

    Args:
        channels: Channels that enter and leave it.
        act: The activation used for `ReLU`.
    """

    def __init__(self, channels: int, act: Act = "relu") -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = _conv(channels), nn.BatchNorm2d(channels)
        self.act1, self.act2 = activation(act), activation(act)

    def forward(self, x_bchw: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x_bchw)))))
        out: Tensor = self.act2(x_bchw + branch)
        return out


def _conv(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def _shown(stride: Pair) -> str:
    return str(stride[0]) if stride[0] == stride[1] else f"{stride[0]} x {stride[1]}"
