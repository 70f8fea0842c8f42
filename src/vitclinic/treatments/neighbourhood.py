"""Which keys a query sees: a k x k neighbourhood on the grid, and the seams of shifted windows.

A position's neighbours lie in its own row of the grid and the r = (k - 1) / 2 rows above and below. On large grids
attention therefore runs in bands: R rows of queries with the R + 2r rows of keys that hold all their neighbours, cut
from the grid by one gather, with a mask inside each. That is (R + 2r) / height of the work of a mask over all keys.

An attention whose map was observed in a forward pass, and that no family describes, has masks over its pairs
(`SeenPairs`): where its queries and keys lie is known for the size of image that was examined, so the masks are of that
size.

Shapes: B images, H heads, N tokens, D channels of a head; P prefix tokens, which stand outside the grid,
N = P + rows * columns; W windows of T tokens (1 where attention is global), Q queries and K keys of a window, tokens
off the grid included; G bands of Q queries and K keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, AttentionSpec, Unit, Windows
from vitclinic.anatomy.maps import SeenMap
from vitclinic.anatomy.sites import Size, watch


class SeenPairs(nn.Module):
    """Pairs of queries and keys, as the attention itself orders them, for each window of an image.

    Args:
        seen: The map.
        pairs_wqk: Bool, [W, Q, K], with the tokens off the grid first.
        device: Where the pairs are needed.
    """

    pairs: Tensor

    def __init__(self, seen: SeenMap, pairs_wqk: Tensor, device: torch.device) -> None:
        super().__init__()
        for axis, order in zip((-2, -1), seen.orders, strict=True):
            if order is not None:
                pairs_wqk = pairs_wqk.index_select(axis, order.argsort())
        self.register_buffer("pairs", pairs_wqk[:, None].to(device), persistent=False)

    def of_batch(self, batch: int) -> Tensor:
        """Return the pairs, [batch, 1, Q, K], where the windows of an image follow each other."""
        return self.pairs.repeat(batch // len(self.pairs), 1, 1, 1)


class SeenNeighbourhood(SeenPairs):
    """The pairs that are at most (kernel - 1) / 2 rows and columns apart.

    Tokens off the grid see all tokens and are seen by all of them.

    Args:
        kernel: Side of the neighbourhood.
        seen: The map; its queries and keys lie on the same grid.
        device: Where the pairs are needed.
    """

    def __init__(self, kernel: int, seen: SeenMap, device: torch.device) -> None:
        super().__init__(seen, near_pairs(seen, kernel), device)
        self.kernel = kernel
        self.sees_all = bool(self.pairs.all())

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, pairs={list(self.pairs.shape)}"

    def near(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask of what may be seen, which broadcasts to [batch, heads, queries, keys]; None for all."""
        if (queries, keys) != tuple(self.pairs.shape[-2:]) or batch % len(self.pairs):
            raise TreatmentError(
                f"local_attention saw {queries} queries and {keys} keys where {self.pairs.shape[-2]} and"
                f" {self.pairs.shape[-1]} were examined; treat the network at the size of its images."
            )
        if self.sees_all:
            return None
        return self.pairs.to(device)[0, 0] if len(self.pairs) == 1 else self.of_batch(batch).to(device)


def near_pairs(seen: SeenMap, kernel: int) -> Tensor:
    """Return which tokens are neighbours on the grid, [W, Q, K], with the tokens off the grid first."""
    queries, keys = locate_padding(seen.queries)[:, :, None], locate_padding(seen.keys)[:, None]
    near = (queries - keys).abs().amax(-1) <= kernel // 2
    return F.pad(near, (seen.prefix[1], 0, seen.prefix[0], 0), value=True)


def locate_padding(cells_wn2: Tensor) -> Tensor:
    """Return (row, column) of all tokens of windows, where padding continues the grid beyond its border.

    Padding, which is at (-1, -1), lies to the other tokens of its window as tokens do in a window without padding.

    Example:
        >>> locate_padding(torch.tensor([[[0, 0], [0, 1]], [[0, 2], [-1, -1]]]))[1].tolist()
        [[0, 2], [0, 3]]
    """
    padded_wn = (cells_wn2 < 0).any(-1)
    whole = cells_wn2[~padded_wn.any(-1)]
    if not padded_wn.any() or not len(whole):
        return cells_wn2
    extents = (whole.amax(1) - whole.amin(1)).sum(-1)  # a window across the border of a rolled grid is wide
    offsets_n2 = whole[extents.argmin()] - whole[extents.argmin()][0]
    real = (~padded_wn).int().argmax(1)
    origins_w2 = cells_wn2[torch.arange(len(real)), real] - offsets_n2[real]
    return torch.where(padded_wn[..., None], origins_w2[:, None] + offsets_n2, cells_wn2)


def apart_pairs(seen: SeenMap, device: torch.device) -> SeenPairs | None:
    """Return the pairs that the network's own mask keeps apart; None if it has no mask."""
    return None if seen.visible is None else SeenPairs(seen, ~seen.visible, device)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

SHARE_OF_KEYS = 1 / 3
"""Bands are used if they hold at most this share of the grid's rows; above it (measured on a CPU) the gather costs
as much as the smaller products save."""


def neighbours(size: Size, kernel: int, prefix: int, device: torch.device | None = None) -> Tensor:
    """Return the mask [N, N] of keys each query (first axis) may see: |row|, |column| distance <= (kernel - 1) / 2.

    Windows are cut at the border of the grid. Prefix tokens see all tokens and are seen by all of them.

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


class _OnGrid(nn.Module):
    """Masks of the attentions that share a grid; they follow its size, for networks of dynamic image size.

    Args:
        spec: The attention whose keys lie on the grid.
        grid: The size of the grid, as examined.
        device: Where the masks are needed.
    """

    def __init__(self, spec: AttentionSpec, grid: Size, device: torch.device) -> None:
        super().__init__()
        assert spec.keys.grid_at is not None  # the keys of an attention with a map are on a grid
        self.grid = grid
        self.spec = spec
        self._grid_at = spec.keys.grid_at
        self._device = device
        self._build()
        watch(self._grid_at, self._follow)  # a bound method: a copy of the network is followed by its own masks

    @property
    def windows(self) -> Windows | None:
        """The windows of the attention on this grid; None for global attention."""
        return None if self.spec.windows is None else self.spec.windows(self.grid)

    def _follow(self, value: object) -> None:
        grid = self._grid_at.size_of(value)
        if grid != self.grid:
            self.grid = grid
            self._device = value.device if isinstance(value, Tensor) else self._device
            with torch.inference_mode(False):  # these tensors may be saved for a later backward pass
                self._build()

    def _build(self) -> None:
        raise NotImplementedError


class Seams(_OnGrid):
    """The pairs of tokens of a shifted window that its mask keeps apart, which come from both ends of the grid."""

    apart: Tensor | None
    """[W, 1, T, T], or None without a shift."""

    def of_batch(self, batch: int) -> Tensor | None:
        """Return the pairs to keep apart, [batch, 1, T, T], where the windows of an image follow each other."""
        return None if self.apart is None else self.apart.repeat(batch // len(self.apart), 1, 1, 1)

    def _build(self) -> None:
        apart = None
        if self.windows is not None and any(self.windows.shift):
            regions = self.windows.regions(self.grid).to(self._device)
            apart = (regions[:, None, :, None] != regions[:, None, None]).contiguous()
        self.register_buffer("apart", apart, persistent=False)


def seams_of(anatomy: Anatomy, unit: Unit) -> Seams | SeenPairs | None:
    """Return the pairs of a unit's windows that its mask keeps apart; None for global attention."""
    if unit.attention is None:
        return None
    device = next(anatomy.network.parameters()).device
    if unit.attention.seen is not None:
        return apart_pairs(unit.attention.seen, device)
    return None if unit.attention.windows is None else Seams(unit.attention, anatomy.size(unit.attention.keys), device)


def neighbourhood_of(anatomy: Anatomy, spec: AttentionSpec, kernel: int) -> Neighbourhood | SeenNeighbourhood:
    """Return which keys of an attention a query sees."""
    device = next(anatomy.network.parameters()).device
    if spec.seen is not None:
        return SeenNeighbourhood(kernel, spec.seen, device)
    return Neighbourhood(kernel, spec, anatomy.size(spec.keys), device)


class Neighbourhood(_OnGrid):
    """The neighbourhood mask of one grid, or of a window of it, shared by all attentions there.

    Args:
        kernel: Side of the neighbourhood.
        spec: The attention.
        grid: The size of the grid, as examined.
        device: Where the mask is needed.
    """

    mask: Tensor | None
    """[N, N], or [G, Q, K] for bands; None if the neighbourhood covers the whole grid or window."""
    keys: Tensor | None
    """The tokens of every band, [G * K]; None without bands."""

    def __init__(self, kernel: int, spec: AttentionSpec, grid: Size, device: torch.device) -> None:
        self.kernel, self.prefix = kernel, spec.keys.prefix
        super().__init__(spec, grid, device)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, grid={self.size[0]} x {self.size[1]}, bands={self.bands if self.banded else 0}"

    @property
    def banded(self) -> bool:
        """True if attention runs in bands."""
        return self.keys is not None

    def near(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask [queries, keys] of what may be seen in each window of a batch, or None for everything."""
        if keys != self.prefix + self.size[0] * self.size[1] or queries not in (keys, self.prefix):
            raise TreatmentError(
                f"local_attention saw {keys} tokens where {self.prefix} + {self.size[0]} x {self.size[1]} fill the"
                " grid; do not drop patches or add tokens before the attention."
            )
        if queries < keys:  # class tokens alone, which see everything
            return None
        return neighbours(self.size, self.kernel, self.prefix, device) if self.banded else self.mask

    def attend_in_bands(self, q_bhnd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, attend: Attend) -> Tensor:
        """Apply attention band by band, each token to its neighbours; prefix tokens see everything."""
        assert self.keys is not None  # banded
        self.near(len(q_bhnd), q_bhnd.shape[2], k_bhnd.shape[2], q_bhnd.device)
        batch, heads, _, width = q_bhnd.shape
        shape = (batch, heads, self.bands, -1, width)
        q_bhgqd = q_bhnd[:, :, self.prefix :].reshape(shape)
        k_bhgkd, v_bhgkd = (x_bhnd.index_select(2, self.keys).view(shape) for x_bhnd in (k_bhnd, v_bhnd))
        mixed_bhnd = attend(q_bhgqd, k_bhgkd, v_bhgkd, self.mask).flatten(2, 3)
        if self.prefix == 0:
            return mixed_bhnd
        return torch.cat((attend(q_bhnd[:, :, : self.prefix], k_bhnd, v_bhnd, None), mixed_bhnd), dim=2)

    def _build(self) -> None:
        self.size = self.grid if self.windows is None else self.windows.size
        rows, columns = self.size
        reach = self.kernel // 2
        keys: Tensor | None = None
        mask: Tensor | None = None
        self.bands = 0
        if reach < max(self.size) - 1:
            mask = neighbours(self.size, self.kernel, self.prefix, self._device)
            height = max(height for height in range(1, max(self.kernel, 2)) if rows % height == 0)
            if self.windows is None and height + 2 * reach <= SHARE_OF_KEYS * rows:
                self.bands = rows // height
                mask, keys = self._cut(mask, height, rows, columns)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("keys", keys, persistent=False)

    def _cut(self, near: Tensor, height: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return the mask and the keys of every band; a band at the border is shifted inwards, not cut."""
        reach, prefix = self.kernel // 2, torch.arange(self.prefix, device=near.device)
        last = rows - height - 2 * reach
        starts = [min(max(row - reach, 0), last) for row in range(0, rows, height)]
        band = torch.arange((height + 2 * reach) * columns, device=near.device) + self.prefix
        keys_gk = torch.stack([torch.cat((prefix, band + start * columns)) for start in starts])
        queries_gq = torch.arange(self.prefix, len(near), device=near.device).view(self.bands, -1)
        return near[queries_gq[:, :, None], keys_gk[:, None, :]], keys_gk.flatten()
