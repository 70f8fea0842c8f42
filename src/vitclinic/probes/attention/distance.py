"""Attention distance: how far attention looks on average [hyeonwoo2023 Fig. 7b].

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitclinic._core.records import UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import AttentionMap, Unit
from vitclinic.probes.attention.tally import AttentionTally, attention_units, divide_scalar, pieces
from vitclinic.probes.probe import (
    DoesNotApply,
    Need,
    Result,
    StreamingProbe,
    Tally,
    check_finite,
    mean_scalar,
    register,
    unit_row,
)
from vitclinic.probes.subject import Subject


def grid_distances(
    positions_wq2: Tensor,
    grid: tuple[int, int],
    keys_wk2: Tensor | None = None,
    key_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Return |p_i - p_j|_1 between the tokens of each window, [W, Q, K], positions being in [0, 1]; 0 for padding.

    The keys are the queries themselves, unless they are given, on a grid of their own.

    Example:
        >>> grid_distances(torch.tensor([[[0, 0], [0, 1], [0, 2]]]), (1, 3))[0, 0]
        tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    keys_wk2 = positions_wq2 if keys_wk2 is None else keys_wk2
    queries, keys = (
        positions.double() / positions.new_tensor([max(1, length - 1) for length in size])
        for positions, size in ((positions_wq2, grid), (keys_wk2, key_grid or grid))
    )
    apart = (queries[:, :, None] - keys[:, None]).abs().sum(-1)
    return apart * ((positions_wq2[..., 0] >= 0)[:, :, None] & (keys_wk2[..., 0] >= 0)[:, None])


def total_distance(weights_bwhqk: Tensor, distances_wqk: Tensor) -> Tensor:
    """Return sum a_ij |p_i - p_j|_1 over windows, queries and keys, for each image and head, [B, H]."""
    weights_bwhn, distances_wn = weights_bwhqk.flatten(3), distances_wqk.flatten(1)
    wide = torch.promote_types(weights_bwhqk.dtype, torch.float32)
    distances_wn = distances_wn.to(wide)
    if weights_bwhqk.dtype == wide and bool((distances_wn == distances_wn[:1]).all()):
        # A matrix-vector product reads the map once and allocates nothing of its size.
        return (weights_bwhn @ distances_wn[0]).double().sum(1)
    sums = [(piece.to(wide) * distances_wn[:, None]).sum(-1) for piece in pieces(weights_bwhn)]
    return torch.cat(sums).double().sum(1)


@register
class AttentionDistance(StreamingProbe):
    """Mean relative distance of attention on the grid, per layer and head [hyeonwoo2023 Fig. 7b].

    `relative_distance` is the mean over i != j of a_ij |p_i - p_j|_1, for spatial tokens with positions p in [0, 1]^2.
    `distance` is the same summed over j: how far a query looks on average, whatever the number of tokens.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> AttentionDistance()(model, loader).arrays["head_distance"].shape  # [layers, heads]
        (12, 3)
    """

    name = "attention_distance"
    group = "Attention"
    rank = 100
    title = "Attention distance"
    question = "How far does attention look?"
    paper = "Hyeon-Woo et al. 2023, Fig. 7b (H2)"
    key_scalars: ClassVar[KeyScalars] = {"distance": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})

    def begin(self, subject: Subject) -> Tally:
        return _Tally(attention_units(subject.anatomy), _Layer, ("distance", "relative_distance"))


class _Layer:
    """Running means of one layer."""

    def __init__(self, seen: AttentionMap) -> None:
        self.tokens = seen.query_grid[0] * seen.query_grid[1]
        wide = torch.promote_types(seen.weights.dtype, torch.float32)
        apart = grid_distances(seen.query_positions(), seen.query_grid, seen.positions(), seen.grid)
        self.apart = F.pad(apart.to(seen.weights.device, wide), (seen.prefix, 0, seen.prefix_queries, 0))
        self.distance, self.heads = RunningMean(), RunningMean()

    def sums(self) -> dict[str, RunningMean]:
        return {"distance": self.distance, "heads": self.heads}

    def add(self, seen: AttentionMap) -> Tensor:
        """Add a batch, and return the mean distance per query of each image."""
        by_head = total_distance(seen.by_image(), self.apart).cpu() / self.tokens
        check_finite(by_head, seen.unit)
        self.heads.add(by_head.numpy())
        self.distance.add(by_head.mean(1).numpy())
        return by_head.mean(1)

    def row(self, unit: Unit) -> UnitRow:
        distance = mean_scalar(self.distance)
        return unit_row(unit, distance=distance, relative_distance=divide_scalar(distance, self.tokens - 1))


class _Tally(AttentionTally[_Layer]):
    def update_attention(self, seen: AttentionMap) -> None:
        pairs = seen.grid != (1, 1) and seen.weights.shape[2] > seen.prefix_queries
        if not pairs:  # a single position, or only the class token has a query
            return
        layer = self.layer(seen)
        by_image = layer.add(seen).numpy()
        self.means["distance"].add(by_image)
        self.means["relative_distance"].add(by_image / (layer.tokens - 1))

    def finish(self) -> Result:
        if not self.layers:
            raise DoesNotApply("no query on the grid has another position to attend to, so there is no distance.")
        return self.result("head_distance")
