"""Hybrid ViT: residual convolutions make the tokens, a few transformer blocks follow, the classifier reads the mean.

Convolutions early and attention late [park2022 Sec. 4], a convolutional stem [wang2022] and global average pooling
[park2022 Fig. 6]: what makes a vision transformer learn from few images in little time. Everything after the tokens is
timm's `VisionTransformer`, so that treatments and probes see an ordinary ViT.

Shapes: B images, C image channels, H x W pixels, D the width, h x w the grid of tokens.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from timm.layers import PatchEmbed
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitclinic._core.errors import ModelError
from vitclinic.models.factory import load_exported, take_exported

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 96, "depth": 1, "num_heads": 3, "mlp_ratio": 2.0},
    "small": {"embed_dim": 192, "depth": 4, "num_heads": 6, "mlp_ratio": 2.0},
    "base": {"embed_dim": 320, "depth": 6, "num_heads": 10, "mlp_ratio": 3.0},
}
"""Widths and depths by size; each has 3.6 to 3.8 times the multiply-adds of the size before at 32 x 32 pixels."""
AUTO = "auto"
"""The size of a recipe whose run chooses one; without data and time it is the smallest."""


class ResidualConvs(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm around which the input is added: ReLU(x + BN(conv(ReLU(BN(conv(x)))))).

    The last BatchNorm starts at zero, so that the block starts as the identity.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.act2 = nn.ReLU(inplace=True)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x_bchw: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x_bchw)))))
        out: Tensor = self.act2(x_bchw + branch)
        return out


class ConvTokenizer(PatchEmbed):  # type: ignore[misc]
    """Tokens from strided convolutions, each but the last followed by residual ones, instead of patches.

    A patch size of 2^k takes k convolutions of stride 2. The last has `embed_dim` channels; the first has a fourth of
    them, but at least 32 (16 if there are more than three), and the others double them up to `embed_dim`. Images whose
    side is no multiple of the patch size are padded, so that no pixel is lost: the grid is ceil(H / p) x ceil(W / p).

    Args:
        img_size: Height and width in pixels.
        patch_size: Pixels per token along a side, a power of 2.
        in_chans: Image channels C.
        embed_dim: Width D of the tokens.
        **keywords: Those of timm's `PatchEmbed`.

    Example:
        >>> import torch
        >>> ConvTokenizer(32, 8, 3, 64)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 16, 64])
    """

    is_stem = True
    """Read by the anatomy: one unit, residual convolutions included."""

    def __init__(
        self, img_size: int | tuple[int, int], patch_size: int, in_chans: int = 3, embed_dim: int = 128, **keywords: Any
    ) -> None:
        stages = int(math.log2(patch_size))
        if 2**stages != patch_size:
            raise ValueError(f"patch_size is {patch_size}; the convolutions of this network need a power of 2.")
        keywords["dynamic_img_pad"] = True
        super().__init__(img_size, patch_size, in_chans, embed_dim, **keywords)
        self.proj = nn.Sequential()
        strides = [2] * stages or [1]
        first = max(32 if stages <= 3 else 16, embed_dim >> (len(strides) - 1))
        entering = in_chans
        for stage, stride in enumerate(strides):
            last = stage == len(strides) - 1
            channels = embed_dim if last else min(embed_dim, first << stage)
            self.proj.append(nn.Conv2d(entering, channels, 3, stride, padding=1, bias=False))
            self.proj.append(nn.BatchNorm2d(channels))
            self.proj.append(nn.ReLU(inplace=True))
            if not last:
                self.proj.append(ResidualConvs(channels))
            entering = channels
        for module in self.proj.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _init_img_size(self, img_size: Any) -> Any:
        """Return size, grid and number of tokens; a border narrower than a patch counts as one."""
        size, _, _ = super()._init_img_size(img_size)
        if size is None:
            return None, None, None
        grid = tuple(math.ceil(side / patch) for side, patch in zip(size, self.patch_size, strict=True))
        return size, grid, math.prod(grid)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take images of another size; the patch size is that of the convolutions and stays."""
        if patch_size is not None and tuple(patch_size) != tuple(self.patch_size):
            raise ValueError("the patch size of a convolutional tokenizer is fixed by its strides.")
        super().set_input_size(img_size)


def fit_stride(side: int) -> int:
    """Return the pixels per token for images of `side` pixels: a power of 2 that leaves 4 to 7 tokens along a side.

    Above 224 pixels the stride stays 32, and the grid grows.

    Example:
        >>> [fit_stride(side) for side in (8, 16, 28, 32, 64, 105, 224, 384)]
        [2, 4, 4, 8, 16, 16, 32, 32]
    """
    return min(32, 2 ** max(0, int(math.log2(side / 4)))) if side >= 4 else 1


@register_model  # type: ignore[untyped-decorator]
def hybrid_vit(size: Literal["auto", "tiny", "small", "base"] = "tiny", **keywords: Any) -> VisionTransformer:
    """Build a hybrid ViT; `size` is tiny, small or base, and `patch_size` is derived from `img_size` unless given."""
    exported = take_exported(keywords)
    size = "tiny" if size == AUTO else size
    if size not in SIZES:
        raise ModelError(f"model.size is {size!r}; choose one of {', '.join(SIZES)}.")
    sides = keywords.setdefault("img_size", 224)
    side = sides if isinstance(sides, int) else min(sides)
    defaults = {"patch_size": fit_stride(side), "class_token": False, "global_pool": "avg", **SIZES[size]}
    network = VisionTransformer(embed_layer=ConvTokenizer, **{**defaults, **keywords})
    load_exported(network, "hybrid_vit", exported)
    return network
