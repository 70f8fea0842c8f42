"""The k x k neighbourhood of every place of a grid: as a mask, or as bands of rows with a mask inside each.

A place's neighbours lie in its own row of the grid and the r = (k - 1) / 2 rows above and below. Bands of R rows of
queries with the R + 2r rows of keys that hold all their neighbours are cut from the grid by one gather, and attention
runs inside each: (R + 2r) / height of the work of a mask over all keys.

Shapes: as in `variant_attention`; P prefix tokens, which stand outside the grid, N = P + rows * columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy import Site
from vitclinic.errors import TreatmentError

Size = tuple[int, int]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

SHARE_OF_KEYS = 1 / 3
"""Bands are used where they hold at most this share of the grid's rows: measured on a CPU, above it the gathering
costs what the smaller products save."""


def neighbours(size: Size, kernel: int, prefix: int, device: torch.device | None = None) -> Tensor:
    """True where a query (first axis) may see a key, [N, N]: |row distance|, |column distance| <= (kernel - 1) / 2.

    Windows are cut at the border of the grid. Prefix tokens see everything and are seen by everything.

    Example:
        >>> neighbours((1, 4), kernel=3, prefix=1).int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    places = torch.cartesian_prod(*(torch.arange(length, device=device) for length in size))
    near = (places[:, None] - places).abs().amax(-1) <= kernel // 2
    seen = torch.ones(prefix + len(places), prefix + len(places), dtype=torch.bool, device=device)
    seen[prefix:, prefix:] = near
    return seen


class Neighbourhood(nn.Module):
    """The neighbourhood of one grid, shared by the attentions that work on it.

    The size of the grid is watched where the anatomy reads it, so that networks of dynamic size keep it right.
    """

    mask: Tensor | None
    """[N, N], or [G, Q, K] for bands; None where the window sees everything."""
    keys: Tensor | None
    """The tokens of every band, [G * K]; None without bands."""

    def __init__(self, kernel: int, prefix: int, size: Size, grid_at: Site) -> None:
        super().__init__()
        self.kernel = kernel
        self.prefix = prefix
        self.size = size
        self._grid_at = grid_at
        like = next(grid_at.module.parameters(), None)
        self._build(size, None if like is None else like.device)
        # A bound method, not a closure: a copy of the network is then watched by its own neighbourhood.
        grid_at.module.register_forward_hook(self._watch)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, grid={self.size[0]} x {self.size[1]}, bands={self.bands if self.banded else 0}"

    @property
    def banded(self) -> bool:
        """Whether attention runs in bands."""
        return self.keys is not None

    def restricting(self, mask: Tensor | None, x_bnc: Tensor) -> Tensor | None:
        """A mask over all keys that is also this neighbourhood's."""
        self._check(x_bnc.shape[1])
        near = neighbours(self.size, self.kernel, self.prefix, x_bnc.device) if self.banded else self.mask
        if mask is None or near is None:
            return near if mask is None else mask
        return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)

    def in_bands(self, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, attend: Attend) -> Tensor:
        """Attention of every token to its neighbours, a band at a time; prefix tokens see everything."""
        assert self.keys is not None  # banded
        self._check(q_bhnd.shape[2])
        batch, heads, _, width = q_bhnd.shape
        shape = (batch, heads, self.bands, -1, width)
        q_bhgqd = q_bhnd[:, :, self.prefix :].reshape(shape)
        k_bhgkd, v_bhgkd = (x_bhnd.index_select(2, self.keys).view(shape) for x_bhnd in (k_bhnd, v_bhnd))
        mixed_bhnd = attend(q_bhgqd, k_bhgkd, v_bhgkd, self.mask).flatten(2, 3)
        if self.prefix == 0:
            return mixed_bhnd
        return torch.cat((attend(q_bhnd[:, :, : self.prefix], k_bhnd, v_bhnd, None), mixed_bhnd), dim=2)

    def _check(self, tokens: int) -> None:
        if tokens != self.prefix + self.size[0] * self.size[1]:
            raise TreatmentError(
                f"local_attention saw {tokens} tokens where {self.prefix} + {self.size[0]} x {self.size[1]} fill the"
                " grid: patches must not be dropped, nor tokens added, in front of the attention."
            )

    def _watch(self, _: nn.Module, __: Any, output: Any) -> None:
        size = self._grid_at.size_of(self._grid_at.pick(output))
        if size != self.size:
            device = self._grid_at.pick(output).device
            with torch.inference_mode(False):  # what is made here may be saved for a backward pass later
                self._build(size, device)

    def _build(self, size: Size, device: torch.device | None) -> None:
        self.size = size
        rows, columns = size
        reach = self.kernel // 2
        keys: Tensor | None = None
        mask: Tensor | None = None
        self.bands = 0
        if reach < max(size) - 1:
            mask = neighbours(size, self.kernel, self.prefix, device)
            height = max(height for height in range(1, max(self.kernel, 2)) if rows % height == 0)
            if height + 2 * reach <= SHARE_OF_KEYS * rows:
                self.bands = rows // height
                mask, keys = self._cut(mask, height, rows, columns)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("keys", keys, persistent=False)

    def _cut(self, near: Tensor, height: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The mask of every band, and its keys; a band at the border is moved inwards, not cut."""
        reach, prefix = self.kernel // 2, torch.arange(self.prefix, device=near.device)
        last = rows - height - 2 * reach
        starts = [min(max(row - reach, 0), last) for row in range(0, rows, height)]
        band = torch.arange((height + 2 * reach) * columns, device=near.device) + self.prefix
        keys_gk = torch.stack([torch.cat((prefix, band + start * columns)) for start in starts])
        queries_gq = torch.arange(self.prefix, len(near), device=near.device).view(self.bands, -1)
        return near[queries_gq[:, :, None], keys_gk[:, None, :]], keys_gk.flatten()
