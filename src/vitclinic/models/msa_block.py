"""The MSA block that takes a conv block's place in a ResNet [park2022 Sec. 4.1, App. E]: local attention as in Swin,
with a relative position bias and without the cyclic shift, in the arrangement of the network around it.

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
    """The options of an MSA block; those of the authors' code where it differs from their text are the last two."""

    head_width: int
    window: int
    shared_bias: bool
    msa_act: Activation


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class WindowAttention(nn.Module):
    """softmax(Q K^T / sqrt(D) + bias) V in windows of `window` x `window` that do not overlap, on [B, H, W, C].

    The bias is learned per head (or, `shared_bias`, is one for all heads, as in the authors' code) and depends on the
    offset of query and key. A grid that the window does not divide is padded at its lower and right ends, and no
    query sees padding; along a side shorter than the window, the window is as long as the side. So the weights fit
    images of every size.
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
        x_gnc = self.proj(mixed_gtnd.transpose(1, 2).flatten(2))
        padded = (grid[0] + pad[0], grid[1] + pad[1])
        return _join_windows(x_gnc, padded, window)[:, : grid[0], : grid[1]]

    def _bias(self, window: Size) -> Tensor:
        """The bias of each (query, key) of a window, [1, T or 1, N, N]."""
        places = [torch.arange(length, device=self.relative_position_bias_table.device) for length in window]
        rows_hh, columns_ww = (place[:, None] - place[None, :] + self.window - 1 for place in places)
        bias_thwhw = self.relative_position_bias_table[:, rows_hh[:, None, :, None], columns_ww[None, :, None, :]]
        return bias_thwhw.flatten(3, 4).flatten(1, 2)[None]


def _cut_windows(x_bhwc: Tensor, window: Size) -> Tensor:
    """[B, H, W, C] as windows [G, N, C], the windows of an image one after the other, row by row."""
    batch, height, width, channels = x_bhwc.shape
    x_brhkwc = x_bhwc.reshape(batch, height // window[0], window[0], width // window[1], window[1], channels)
    return x_brhkwc.transpose(2, 3).reshape(-1, window[0] * window[1], channels)


def _join_windows(x_gnc: Tensor, grid: Size, window: Size) -> Tensor:
    """The inverse of `_cut_windows`."""
    x_brkhwc = x_gnc.reshape(-1, grid[0] // window[0], grid[1] // window[1], *window, x_gnc.shape[-1])
    return x_brkhwc.transpose(2, 3).reshape(-1, *grid, x_gnc.shape[-1])


class MsaBlock(nn.Module):
    """x + attention(BN(conv(act(BN(x))))), the conv 1 x 1 to `width`: the block among pre-activation blocks."""

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
    """act(x + BN(attention(BN(conv(x))))): the layers of `MsaBlock` among post-activation blocks.

    As in the conv blocks there, the norm and the activation that stand at a pre-activation block's beginning stand at
    its end.
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
    """Return a new MSA block with the channels, the bottleneck's width and the stochastic depth of a block of a ResNet.

    `block` is one that changes neither channels nor grid, of timm, torchvision or `PreActResNet`.
    """
    weight, channels = block.conv1.weight, block.conv1.in_channels
    drop_path = getattr(getattr(block, "drop_path", None), "drop_prob", 0.0)
    msa = arrangement(channels, channels // block.expansion, heads, drop_path=drop_path, **options)
    return msa.to(weight.device, weight.dtype).train(block.training)


def _conv1x1(channels: int, width: int) -> nn.Conv2d:
    """Without bias, for a norm follows; its first values are those of the convs of a ResNet."""
    conv = nn.Conv2d(channels, width, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _activation(name: str) -> nn.Module:
    if name not in _ACTIVATIONS:
        raise ValueError(f"msa_act is {name!r}; write one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]()
