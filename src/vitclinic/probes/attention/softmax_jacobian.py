"""Softmax Jacobian: its norms at each query's attention [hyeonwoo2023 Sec. 3.1, Fig. 5].

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import Scalar, UnitRow
from vitclinic._core.registry import FigureSpec, KeyScalars
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


def nuclear_norm(rows: Tensor) -> Tensor:
    """Return |diag(a) - a a^T|_* = sum_j (a_j - a_j^2) of each row a [..., K] that sums to 1, in the rows' dtype.

    The Jacobian of a softmax is symmetric and positive semi-definite, so its nuclear norm is its trace.
    """
    return (rows - rows.square()).sum(-1)


def frobenius_norm(rows: Tensor) -> Tensor:
    """Return |diag(a) - a a^T|_F of each row a [..., K], in the rows' dtype.

        |J|_F^2 = sum_j a_j^2 - 2 sum_j a_j^3 + (sum_j a_j^2)^2

    The terms cancel where a row has a single key, so they are added in float64.
    """
    wide = rows.double()
    squares = wide.square()
    total = squares.sum(-1)
    return (total - 2 * (squares * wide).sum(-1) + total.square()).clamp_min(0).sqrt().to(rows.dtype)


def _norms(weights: Tensor, visible: Tensor | None) -> Tensor:
    """Return both norms of each row of `weights` [..., K], as [..., 2] in float64.

    With `visible`, rows are restricted to their visible keys; a row without any has norms of 0.
    """
    found = []
    for piece in pieces(weights):
        rows = piece.double() if visible is None else piece.double() * visible
        rows = rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        found.append(torch.stack((nuclear_norm(rows), frobenius_norm(rows)), dim=-1))
    return torch.cat(found)


@register
class SoftmaxJacobian(StreamingProbe):
    """Norms of the Jacobian of attention's softmax, per layer: how steep it is [hyeonwoo2023 Sec. 3.1, Fig. 5].

    The Jacobian of a = softmax(s) is J = diag(a) - a a^T. Its nuclear norm, sum_j (a_j - a_j^2), is largest where
    attention is uniform, 1 - 1/K, and 0 where it has a single key; `ratio` is the share of that maximum. Means over the
    heads and queries of an image, class token included, averaged over images.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> 0 < SoftmaxJacobian()(model, loader).scalars["ratio"].value <= 1
        True
    """

    name = "softmax_jacobian"
    group = "Attention"
    rank = 95
    title = "Softmax Jacobian"
    question = "How steep is the softmax at the attention that was learned?"
    paper = "Hyeon-Woo et al. 2023, Sec. 3.1, Fig. 5 (H1)"
    key_scalars: ClassVar[KeyScalars] = {"ratio": None, "frobenius": None}
    figures = (
        FigureSpec(
            name="softmax-jacobian-layers",
            kind="layers",
            values={"ratio": "nuclear norm / maximum", "frobenius": "Frobenius norm"},
            axis="attention layer",
            table=["nuclear", "maximum"],
            title="Norm of the softmax Jacobian by layer",
            reading="Each point is a norm of the softmax's Jacobian at the attention of a layer, mean over heads,"
            " queries and images. A nuclear norm near its maximum belongs to dense attention, which one step of"
            " training easily breaks; one near 0 to attention on single keys, which hardly any gradient passes.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})

    def begin(self, subject: Subject) -> Tally:
        return _Tally(attention_units(subject.anatomy), _Layer, ("ratio", "nuclear", "frobenius"))


class _Layer:
    """Running means of one layer."""

    def __init__(self, seen: AttentionMap) -> None:
        self.queries = VisibleQueries(seen)
        self.maximum = float((1 - 1 / self.queries.keys).mean())
        self.nuclear, self.frobenius, self.heads = RunningMean(), RunningMean(), RunningMean()

    def sums(self) -> dict[str, RunningMean]:
        return {"nuclear": self.nuclear, "frobenius": self.frobenius, "heads": self.heads}

    def add(self, seen: AttentionMap) -> NDArray[np.float64]:
        """Add a batch, and return the mean nuclear and Frobenius norm of each image, [B, 2]."""
        norms_bwhq2 = _norms(seen.by_image(), self.queries.visible)
        by_head_bh2 = norms_bwhq2.transpose(1, 2).flatten(2, 3)[:, :, self.queries.counted].mean(2).cpu().numpy()
        check_finite(by_head_bh2, seen.unit)
        self.heads.add(by_head_bh2[..., 0])
        by_image_b2: NDArray[np.float64] = by_head_bh2.mean(1)
        self.nuclear.add(by_image_b2[:, 0])
        self.frobenius.add(by_image_b2[:, 1])
        return by_image_b2

    def row(self, unit: Unit) -> UnitRow:
        nuclear = mean_scalar(self.nuclear)
        values = {"nuclear": nuclear, "frobenius": mean_scalar(self.frobenius), "maximum": Scalar(value=self.maximum)}
        if self.maximum > 0:  # with a single key, the Jacobian is always 0
            values["ratio"] = divide_scalar(nuclear, self.maximum)
        return unit_row(unit, **values)


class _Tally(AttentionTally[_Layer]):
    def update_attention(self, seen: AttentionMap) -> None:
        layer = self.layer(seen)
        nuclear, frobenius = layer.add(seen).T
        if layer.maximum > 0:
            self.means["ratio"].add(nuclear / layer.maximum)
            self.means["nuclear"].add(nuclear)
            self.means["frobenius"].add(frobenius)

    def finish(self) -> Result:
        if not self.means["ratio"].running.n:
            raise DoesNotApply("every query sees a single key, so the softmax of attention is constant.")
        return self.result("head_nuclear")
