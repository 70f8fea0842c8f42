"""Attention maps: the weights of one unit for one batch, how they are computed, and how they lie on the grid.

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys, N tokens, D channels of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.anatomy.sites import Size

if TYPE_CHECKING:
    from vitclinic.anatomy.units import Unit


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows on a grid that is rolled back by `shift` and padded to a multiple of `size`.

    A map's batch axis is B * number of windows, windows running fastest. A shifted window at the end of an axis holds
    tokens from both ends of the grid, which a mask keeps apart.

    Args:
        size: (height, width) of a window.
        shift: How far the grid is rolled back, (rows, columns).
        pad_first: Pad and then roll (torchvision, Hugging Face); otherwise roll and then pad (timm).

    Example:
        >>> Windows(size=(1, 2)).positions((1, 4)).tolist()
        [[[0, 0], [0, 1]], [[0, 2], [0, 3]]]
    """

    size: Size
    shift: Size = (0, 0)
    pad_first: bool = False

    def positions(self, grid: Size) -> Tensor:
        """Return (row, column) of every token of every window, [windows, tokens, 2]; (-1, -1) is padding."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        places_hw2 = torch.stack((rows, columns), dim=-1)
        margin = self._padding(grid)

        def pad(x_hw2: Tensor) -> Tensor:
            return F.pad(x_hw2, (0, 0, 0, margin[1], 0, margin[0]), value=-1)

        def roll(x_hw2: Tensor) -> Tensor:
            return x_hw2.roll((-self.shift[0], -self.shift[1]), dims=(0, 1))

        return self._cut(roll(pad(places_hw2)) if self.pad_first else pad(roll(places_hw2)))

    def regions(self, grid: Size) -> Tensor:
        """Return the side of the seam of every token of every window, [windows, tokens].

        Tokens of a window may attend to each other if their numbers are equal. The seam lies `shift` before the end of
        the padded axis, even if that is padding (in timm, which rolls first, this is then not where the grid wraps).
        """
        rows, columns = (
            (torch.arange(length + pad) >= length + pad - shift).int()
            for length, pad, shift in zip(grid, self._padding(grid), self.shift, strict=True)
        )
        return self._cut((2 * rows[:, None] + columns)[..., None]).squeeze(-1)

    def _padding(self, grid: Size) -> list[int]:
        return [-length % window for length, window in zip(grid, self.size, strict=True)]

    def _cut(self, x_hwc: Tensor) -> Tensor:
        """Cut the padded grid into windows, [windows, tokens, C]."""
        height, width = self.size
        windows = x_hwc.reshape(len(x_hwc) // height, height, -1, width, x_hwc.shape[-1])
        return windows.transpose(1, 2).reshape(-1, height * width, x_hwc.shape[-1])


SOFTMAX = frozenset((F.softmax, torch.softmax, Tensor.softmax))
ATTENTION = SOFTMAX | {F.scaled_dot_product_attention, F.multi_head_attention_forward}
"""Functions that compute an attention map, as a function mode sees them."""
PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum))
"""Functions that multiply a map by the values."""
MHA_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def is_over_last_axis(result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the softmax with these arguments runs over the last axis, which `result` has too."""
    return kwargs.get("dim", *args[1:2]) in (-1, result.ndim - 1)


def project_heads(call: Mapping[str, Any], tokens_nbc: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the queries, keys and values [B, H, N, D] of a call of `multi_head_attention_forward`."""
    separate = [call[f"{name}_proj_weight"] for name in "qkv"]
    weights = separate if call["use_separate_proj_weight"] else call["in_proj_weight"].chunk(3)
    biases = [None] * 3 if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    for x_nbc, weight, bias in zip(tokens_nbc, weights, biases, strict=True):
        projected = F.linear(x_nbc, weight, bias)
        yield projected.reshape(*projected.shape[:2], call["num_heads"], -1).permute(1, 2, 0, 3)


def join_heads(mixed_bhqd: Tensor, call: Mapping[str, Any]) -> Tensor:
    """Return the output [Q, B, C] of `multi_head_attention_forward` from the weighted sums of all heads."""
    return F.linear(mixed_bhqd.permute(2, 0, 1, 3).flatten(2), call["out_proj_weight"], call["out_proj_bias"])


class AttentionCall(NamedTuple):
    """The arguments of a call of `scaled_dot_product_attention`, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def mask(self) -> Tensor | None:
        """The mask that counts; a causal one is True for keys that count."""
        if not self.is_causal:
            return self.attn_mask
        shape = (self.query.shape[-2], self.key.shape[-2])
        return torch.ones(shape, dtype=torch.bool, device=self.query.device).tril()

    def repeat_groups(self) -> AttentionCall:
        """Return the call with keys and values for each head, if queries are grouped."""
        if not self.enable_gqa:
            return self
        heads = self.query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (self.key, self.value))
        return self._replace(key=key, value=value, enable_gqa=False)


def hidden_by(mask: Tensor) -> Tensor:
    """Return where a mask, which is False or minus infinity there, hides a key from a query."""
    return ~mask if mask.dtype == torch.bool else mask == -torch.inf


def attention_scores(
    q: Tensor, k: Tensor, scale: float | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return q k^T scale, with the finite numbers of an added mask, and where the mask hides a key from a query.

    Args:
        q: Queries, [..., Q, D].
        k: Keys, [..., K, D].
        scale: 1 / sqrt(D) unless given.
        mask: True for keys that count, or numbers to add.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if mask is None:
        return scores, None
    hidden = hidden_by(mask)
    return (scores if mask.dtype == torch.bool else scores + mask.masked_fill(hidden, 0.0)), hidden


@dataclass(frozen=True, eq=False)
class SeenMap:
    """One attention map of a recorded pass: where to find it in later passes, and how its axes lie.

    Args:
        numbers: Which attention it is inside a call of its module, from 0; several of them are groups of heads.
        within: The network, if it calls the module several times.
        call: Which of these calls is meant, from 0.
        splits: Lengths into which each axis before Q and K falls; -1 is that of images.
        axes: The order of the axes that this gives: images, windows, heads.
        windows: Number of windows.
        queries: (row, column) of each spatial query, [W, Q, 2]; (-1, -1) is padding.
        keys: (row, column) of each spatial key, [W, K, 2].
        prefix: Number of queries and of keys that are off the grid.
        orders: Which query and which key comes where, with those off the grid first; None if they are in order.
        grids: Size of the grid of queries and of keys.
        visible: Which keys each query may attend to, bool [W, Q, K]; None if all.
        tail: The axes of queries and keys, from the end.
        operand: None for what a softmax returns; else `numbers` count matrix products, and the map is this operand.
        mixed_later: True if the network mixes the heads of the map before it is applied, as talking heads do.
    """

    numbers: tuple[int, ...]
    within: nn.Module | None
    call: int
    splits: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    windows: int
    queries: Tensor
    keys: Tensor
    prefix: tuple[int, int]
    orders: tuple[Tensor | None, Tensor | None]
    grids: tuple[Size, Size]
    visible: Tensor | None
    tail: tuple[int, int] = (-2, -1)
    operand: int | None = None
    mixed_later: bool = False

    def arrange(self, weights: Tensor) -> Tensor:
        """Return a map of this attention, of one group of heads if there are several, as [B * W, H, Q, K]."""
        arranged = arrange_map(weights.movedim(self.tail, (-2, -1)), self.splits, self.axes, self.windows)
        for axis, order in zip((-2, -1), self.orders, strict=True):
            if order is not None:
                arranged = arranged.index_select(axis, order.to(arranged.device))
        return arranged

    def visibility(self) -> Tensor:
        """Return which keys each query may attend to, bool [W, Q, K]: not across a mask, and no padding."""
        real = [
            F.pad(cells[..., 0] >= 0, (off, 0), value=True)
            for cells, off in zip((self.queries, self.keys), self.prefix, strict=True)
        ]
        together = real[0][:, :, None] & real[1][:, None]
        return together if self.visible is None else together & self.visible


def arrange_map(weights: Tensor, splits: tuple[tuple[int, ...], ...], axes: tuple[int, ...], windows: int) -> Tensor:
    """Return a map as [B * W, H, Q, K], from the lengths into which its axes fall, and their order."""
    rows, columns = weights.shape[-2:]
    split = weights.reshape(*(length for lengths in splits for length in lengths), rows, columns)
    images = split.shape[axes[0]]
    return split.permute(*axes, -2, -1).reshape(images * windows, -1, rows, columns)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention of one unit for one batch: `weights` [B * windows, H, Q, K], each row summing to 1.

    The first `prefix` keys (and queries, unless the only query is the class token) are off the grid. `hidden` is True
    where an explicit mask of minus infinity keeps a query from a key, [Q, K]; it is the same for all images and heads
    (read from the first) and None if there is no such mask. The masks of shifted windows are not part of it. `source`
    is the tensor of the autograd graph that the weights come from, if they were recorded with `grad=True`; it is a
    tuple if several softmaxes compute groups of heads.
    """

    unit: Unit
    weights: Tensor
    prefix: int
    grid: Size
    windows: Windows | None
    hidden: Tensor | None = None
    source: Tensor | tuple[Tensor, ...] | None = None

    def arrange(self, gradients: Tensor | Sequence[Tensor]) -> Tensor:
        """Return gradients with respect to `source` in the shape of the weights; uniform heads have none."""
        parts = [gradients] if isinstance(gradients, Tensor) else gradients
        gradient = torch.cat([part if self.seen is None else self.seen.arrange(part) for part in parts], dim=1)
        return F.pad(gradient, (0, 0, 0, 0, 0, self.weights.shape[1] - gradient.shape[1]))

    @property
    def seen(self) -> SeenMap | None:
        """The map as the pass of an observed network showed it."""
        return None if self.unit.attention is None else self.unit.attention.seen

    @property
    def prefix_queries(self) -> int:
        """Number of queries that are off the grid; they come first."""
        return min(self.prefix, self.weights.shape[2]) if self.seen is None else self.seen.prefix[0]

    @property
    def query_grid(self) -> Size:
        """Size of the grid of the queries: that of the keys, unless an observed network has fewer keys."""
        return self.grid if self.seen is None else self.seen.grids[0]

    @property
    def has_class(self) -> bool:
        """True if the first query is the class token."""
        return self.prefix_queries > 0 and self.unit.attention is not None and self.unit.attention.keys.has_class

    def by_image(self) -> Tensor:
        """Return the weights as [B, windows, H, Q, K]."""
        return self.weights.reshape(-1, len(self.positions()), *self.weights.shape[1:])

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, bool [windows, Q, K]: not across a mask, and no padding."""
        if self.seen is not None:
            return self.seen.visibility().to(self.weights.device)
        windows = self.windows or Windows(self.grid)
        regions, real = windows.regions(self.grid), windows.positions(self.grid)[..., 0] >= 0
        together = (regions[:, :, None] == regions[:, None]) & real[:, :, None] & real[:, None]
        queries = self.weights.shape[2]
        seen = F.pad(together, (self.prefix, 0, self.prefix, 0), value=True)[:, :queries].to(self.weights.device)
        return seen if self.hidden is None else seen & ~self.hidden

    def positions(self) -> Tensor:
        """Return (row, column) on the grid of each spatial key, [windows, keys - prefix, 2]; (-1, -1) is padding."""
        return (self.windows or Windows(self.grid)).positions(self.grid) if self.seen is None else self.seen.keys

    def query_positions(self) -> Tensor:
        """Return (row, column) on their grid of each spatial query, [windows, queries - prefix_queries, 2]."""
        return self.positions() if self.seen is None else self.seen.queries
