"""The MSA block that replaces a conv block in a ResNet [park2022 Sec. 4.1, App. E]: local attention as in Swin, with
a relative position bias and without the cyclic shift, in the layer order of the network around it.

Shapes: B images, C channels, H and W the grid, r and k the rows and columns of windows on it, h and w a window,
G windows of all images, N = h * w tokens of a window, T heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

import torch
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

Size = tuple[int, int]
Activation = Literal["relu", "gelu"]


class MsaOptions(TypedDict, total=False):
    """Options of an MSA block; in the last two, the authors' code differs from their text."""

    head_width: int
    window: int
    shared_bias: bool
    msa_act: Activation


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class WindowAttention(nn.Module):
    """Attention softmax(Q K^T / sqrt(D) + bias) V in non-overlapping windows, on [B, H, W, C].

    The bias depends on the offset between query and key and is learned per head (with `shared_bias` once for all
    heads, as in the authors' code). If the window does not divide the grid, the grid is padded at the bottom and right,
    and no query sees the padding; along a side shorter than the window, the window shrinks to that side. So the same
    weights work for images of any size.
    """

    def __init__(
        self,
        width: int,
        out_width: int,
        heads: int,
        *,
        head_width: int = 64,
        window: int = 7,
        shared_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.qkv = nn.Linear(width, 3 * heads * head_width)
        self.proj = nn.Linear(heads * head_width, out_width)
        offsets = 2 * window - 1
        tables = 1 if shared_bias else heads
        self.relative_position_bias_table = nn.Parameter(torch.empty(tables, offsets, offsets))
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x_bhwc: Tensor) -> Tensor:
        batch, *grid = x_bhwc.shape[:3]
        window = (min(self.window, grid[0]), min(self.window, grid[1]))
        pad = (-grid[0] % window[0], -grid[1] % window[1])
        x_gnc = _cut_windows(F.pad(x_bhwc, (0, 0, 0, pad[1], 0, pad[0])), window)
        q_gtnd, k_gtnd, v_gtnd = self.qkv(x_gnc).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        added = self._bias(window)
        if any(pad):
            seen_hw = torch.ones(grid, device=x_bhwc.device).bool()
            seen_wn = _cut_windows(F.pad(seen_hw, (0, pad[1], 0, pad[0]))[None, :, :, None], window)[..., 0]
            added = added.masked_fill(~seen_wn[:, None, None, :], -torch.inf).repeat(batch, 1, 1, 1)
        mixed_gtnd = F.scaled_dot_product_attention(q_gtnd, k_gtnd, v_gtnd, attn_mask=added.to(q_gtnd.dtype))
        x_gnc = self.proj(mixed_gtnd.transpose(1, 2).reshape(*x_gnc.shape[:2], -1))  # a view would not export
        padded = (grid[0] + pad[0], grid[1] + pad[1])
        return _join_windows(x_gnc, padded, window)[:, : grid[0], : grid[1]]

    def _bias(self, window: Size) -> Tensor:
        """Return the bias of each (query, key) pair of a window, [1, T or 1, N, N]."""
        places = [torch.arange(length, device=self.relative_position_bias_table.device) for length in window]
        rows_hh, columns_ww = (place[:, None] - place[None, :] + self.window - 1 for place in places)
        bias_thwhw = self.relative_position_bias_table[:, rows_hh[:, None, :, None], columns_ww[None, :, None, :]]
        return bias_thwhw.flatten(3, 4).flatten(1, 2)[None]


def _cut_windows(x_bhwc: Tensor, window: Size) -> Tensor:
    """Cut [B, H, W, C] into windows [G, N, C], image by image and row by row."""
    batch, height, width, channels = x_bhwc.shape
    x_brhkwc = x_bhwc.reshape(batch, height // window[0], window[0], width // window[1], window[1], channels)
    return x_brhkwc.transpose(2, 3).reshape(-1, window[0] * window[1], channels)


def _join_windows(x_gnc: Tensor, grid: Size, window: Size) -> Tensor:
    """Undo `_cut_windows`."""
    x_brkhwc = x_gnc.reshape(-1, grid[0] // window[0], grid[1] // window[1], *window, x_gnc.shape[-1])
    return x_brkhwc.transpose(2, 3).reshape(-1, *grid, x_gnc.shape[-1])


class MsaBlock(nn.Module):
    """MSA block for pre-activation ResNets: x + attention(BN(conv(act(BN(x))))), with a 1 x 1 conv to `width`."""

    def __init__(
        self,
        channels: int,
        width: int,
        heads: int,
        *,
        head_width: int = 64,
        window: int = 7,
        shared_bias: bool = False,
        msa_act: Activation = "relu",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.act = _activation(msa_act)
        self.conv = _conv1x1(channels, width)
        self.norm2 = nn.BatchNorm2d(width)
        self.attn = WindowAttention(
            width, channels, heads, head_width=head_width, window=window, shared_bias=shared_bias
        )
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x_bchw: Tensor) -> Tensor:
        branch = self.norm2(self.conv(self.act(self.norm1(x_bchw))))
        branch = self.attn(branch.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = x_bchw + self.drop_path(branch)
        return out


class PostActMsaBlock(nn.Module):
    """MSA block for post-activation ResNets: act(x + BN(attention(BN(conv(x))))).

    It has the layers of `MsaBlock`, but norm and activation come at the end of the block instead of its beginning, as
    in the conv blocks of such networks.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        heads: int,
        *,
        head_width: int = 64,
        window: int = 7,
        shared_bias: bool = False,
        msa_act: Activation = "relu",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv = _conv1x1(channels, width)
        self.norm1 = nn.BatchNorm2d(width)
        self.attn = WindowAttention(
            width, channels, heads, head_width=head_width, window=window, shared_bias=shared_bias
        )
        self.norm2 = nn.BatchNorm2d(channels)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.act = _activation(msa_act)

    def forward(self, x_bchw: Tensor) -> Tensor:
        branch = self.norm1(self.conv(x_bchw))
        branch = self.norm2(self.attn(branch.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        out: Tensor = self.act(x_bchw + self.drop_path(branch))
        return out


def build_msa_block(
    block: Any, arrangement: type[MsaBlock] | type[PostActMsaBlock], heads: int, **options: Unpack[MsaOptions]
) -> MsaBlock | PostActMsaBlock:
    """Build an MSA block with the channels, bottleneck width and stochastic depth of a conv block.

    Args:
        block: A block of timm's or torchvision's ResNet or of `PreActResNet` that keeps channels and grid.
        arrangement: The class of the new block.
        heads: Number of heads.
        **options: Further options of the block.
    """
    weight, channels = block.conv1.weight, block.conv1.in_channels
    drop_path = getattr(getattr(block, "drop_path", None), "drop_prob", 0.0)
    msa = arrangement(channels, channels // block.expansion, heads, drop_path=drop_path, **options)
    return msa.to(weight.device, weight.dtype).train(block.training)


def _conv1x1(channels: int, width: int) -> nn.Conv2d:
    """Build a 1 x 1 conv, initialized as in a ResNet; without bias, since a norm follows."""
    conv = nn.Conv2d(channels, width, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _activation(name: str) -> nn.Module:
    if name not in _ACTIVATIONS:
        raise ValueError(f"msa_act is {name!r}; write one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]()
