"""Attention maps: the weights of one unit for one batch, and what a recorded pass shows of how they lie.

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.anatomy.sites import Size
from vitclinic.anatomy.windows import Windows

if TYPE_CHECKING:
    from vitclinic.anatomy.units import Unit

ATTENTION = frozenset(
    (F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax, torch.softmax, Tensor.softmax)
)
"""Functions that compute an attention map, as a function mode sees them."""
PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum))
"""Functions that multiply a map by the values."""


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
        """What an observed network's pass showed of the map."""
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
