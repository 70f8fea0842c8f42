"""Attention entropy: that of each row of the maps [hyeonwoo2023 Fig. 4, 7a].

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import Scalar, UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import AttentionMap, Unit
from vitclinic.probes.attention.tally import AttentionTally, VisibleQueries, attention_units, divide_scalar, pieces
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

Values = NDArray[np.float64]

UPPER = 85.0
"""Percentile above which the upper 15% of the entropies lie."""


def row_entropy(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return -sum_k a_k log a_k of each row of `weights` [..., K], with the natural logarithm, in float32 at least.

    With `visible` (booleans that broadcast against `weights`), each row is restricted to its visible keys and
    renormalized to sum to 1; rows of half-precision maps are renormalized, too. A row without visible keys has entropy
    0. No temporary tensor of the size of `weights` is allocated.

    Example:
        >>> row_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    if visible is None and weights.dtype in (torch.float32, torch.float64):
        rows = weights.reshape(-1, weights.shape[-1])
        return torch.cat([_entropy(piece) for piece in pieces(rows)]).view(weights.shape[:-1])
    return torch.cat([_visible_entropy(piece, visible) for piece in pieces(weights)])


def _entropy(rows: Tensor) -> Tensor:
    logs = rows.clamp_min(torch.finfo(rows.dtype).tiny).log_()
    return (0 - logs.mul_(rows).sum(-1)).clamp_min_(0)  # no minus zero


def _visible_entropy(weights: Tensor, visible: Tensor | None) -> Tensor:
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    kept = weights if visible is None else weights * visible
    total = kept.sum(-1)
    return (_entropy(kept) / total + total.log()).masked_fill(total == 0, 0.0).clamp_min_(0)


@register
class AttentionEntropy(StreamingProbe):
    """Entropy of attention per layer and head, relative to uniform attention [hyeonwoo2023 Fig. 4, 7a].

    -sum_j a_ij log a_ij (natural logarithm) of every head and query, class token included. Reported are the mean and
    the 85th percentile over the heads and queries of an image, averaged over images.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> 0 < AttentionEntropy()(model, loader).scalars["ratio"].value <= 1
        True
    """

    name = "attention_entropy"
    group = "Attention"
    rank = 90
    title = "Attention entropy"
    question = "How close is attention to uniform?"
    paper = "Hyeon-Woo et al. 2023, Fig. 4, 7a (H1, H2)"
    key_scalars: ClassVar[KeyScalars] = {"ratio": None, "upper_ratio": None, "class_ratio": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})

    def begin(self, subject: Subject) -> Tally:
        return _Tally(attention_units(subject.anatomy), _Layer, ("ratio", "upper_ratio", "class_ratio"))


class _Layer:
    """Running means of one layer."""

    def __init__(self, seen: AttentionMap) -> None:
        self.queries = VisibleQueries(seen)
        self.maximum = float(self.queries.keys.log().mean())
        self.class_maximum = float(self.queries.keys_wq[0, 0].double().log()) if seen.has_class else 0.0
        self.mean, self.upper, self.heads, self.of_class, self.of_patches = (RunningMean() for _ in range(5))

    def sums(self) -> dict[str, RunningMean]:
        parts = ("mean", "upper", "heads", "of_class", "of_patches")
        return {part: getattr(self, part) for part in parts}

    def add(self, seen: AttentionMap) -> tuple[Values, Values, Values | None]:
        """Add a batch, and return the mean, upper percentile and class-token entropy of each image."""
        entropies_bwhq = row_entropy(seen.by_image(), self.queries.visible)
        values_bhn = entropies_bwhq.transpose(1, 2).flatten(2)
        if self.queries.visible is not None:
            values_bhn = values_bhn[:, :, self.queries.counted]
        values = values_bhn.double().cpu().numpy()
        check_finite(values, seen.unit)
        means, upper = values.mean((1, 2)), np.percentile(values.reshape(len(values), -1), UPPER, axis=1)
        self.mean.add(means)
        self.upper.add(upper)
        self.heads.add(values.mean(2))
        of_class = values[:, :, 0].mean(1) if seen.has_class else None
        if of_class is not None:
            self.of_class.add(of_class)
        if 0 < seen.prefix_queries < values.shape[2]:
            self.of_patches.add(values[:, :, seen.prefix_queries :].mean((1, 2)))
        return means, upper, of_class

    def row(self, unit: Unit) -> UnitRow:
        values = {"entropy": mean_scalar(self.mean), "upper": mean_scalar(self.upper)}
        if self.of_class.n:
            values["class_entropy"] = mean_scalar(self.of_class)
        if self.of_patches.n:
            values["patch_entropy"] = mean_scalar(self.of_patches)
        values["maximum"] = Scalar(value=self.maximum)
        if self.maximum > 0:  # with a single key, the entropy is always 0
            values["ratio"] = divide_scalar(values["entropy"], self.maximum)
        return unit_row(unit, **values)


class _Tally(AttentionTally[_Layer]):
    def update_attention(self, seen: AttentionMap) -> None:
        layer = self.layer(seen)
        means, upper, of_class = layer.add(seen)
        if layer.maximum > 0:
            self.means["ratio"].add(means / layer.maximum)
            self.means["upper_ratio"].add(upper / layer.maximum)
        if of_class is not None and layer.class_maximum > 0:
            self.means["class_ratio"].add(of_class / layer.class_maximum)

    def finish(self) -> Result:
        if not self.means["ratio"].running.n:
            raise DoesNotApply("every query sees a single key, so the entropy of attention is always 0.")
        return self.result("head_entropy")
