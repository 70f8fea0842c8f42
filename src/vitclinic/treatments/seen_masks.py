"""Masks over the pairs of an attention whose map was observed in a forward pass, and that no family describes.

Where its queries and keys lie is known for the size of image that was examined, so the masks are of that size.

Shapes: W windows of an image (1 where attention is global), Q queries, K keys, tokens off the grid included.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy.maps import SeenMap


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


def shares_grid(seen: SeenMap) -> bool:
    """Return True if queries and keys lie on the same grid, or the only queries are off it (class attention)."""
    return seen.grids[0] == seen.grids[1] or seen.queries.shape[1] == 0


def apart_pairs(seen: SeenMap, device: torch.device) -> SeenPairs | None:
    """Return the pairs that the network's own mask keeps apart; None if it has no mask."""
    return None if seen.visible is None else SeenPairs(seen, ~seen.visible, device)
