"""Learned scales of Context Broadcasting, layer by layer [hyeonwoo2023 Fig. 8]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic._core.records import Scalar
from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.anatomy import Unit
from vitclinic.probes.probe import DoesNotApply, Need, OwningProbe, Result, register, unit_row
from vitclinic.probes.subject import Subject


def quantile_ratio(scale: NDArray[np.float64]) -> float | None:
    """Return |lambda|_0.1 / |lambda|_0.9, quantiles of magnitudes; None if the latter is 0, as before training.

    Example:
        >>> round(quantile_ratio(-np.arange(1.0, 12.0)), 3)
        0.2
    """
    low, high = np.quantile(np.abs(scale), [0.1, 0.9])
    return None if high == 0 else float(low / high)


@register
class CBScale(OwningProbe):
    """Quantile ratio and mean of the learned scales of Context Broadcasting (CB_S) per layer [hyeonwoo2023 Fig. 8].

    The ratio is |lambda|_0.1 / |lambda|_0.9, with the 10% and 90% quantiles of the magnitudes of the scales lambda in
    R^D of one layer: from 0 to 1, and 1 where all channels are scaled alike.
    Scales are read from modules with an attribute `context_scale`, which the treatment `context_broadcasting` with
    `scaled: true` adds.
    """

    name = "cb_scale"
    group = "Attention"
    rank = 120
    title = "Context Broadcasting scales"
    question = "Which layers use the mean of all tokens?"
    paper = "Hyeon-Woo et al. 2023, Fig. 8 (H4)"
    key_scalars: ClassVar[KeyScalars] = {"ratio": None, "mean": None}
    figures = (
        FigureSpec(
            name="cb-scale-layers",
            kind="layers",
            values={"ratio": "ratio of quantiles", "mean": "mean scale"},
            axis="layer with learned scales",
            title="Learned scales of Context Broadcasting",
            reading="Above, the 10% quantile of the magnitudes of a layer's scales over their 90% quantile: near 1"
            " where all channels use the broadcast context alike; below, their mean. Hyeon-Woo et al. found that"
            " both grow with depth, so that upper layers use dense interactions most.",
        ),
    )
    revision: ClassVar[int] = 2  # quantiles of magnitudes, as the paper writes
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})
    by_default: ClassVar[bool] = False

    def forwards(self, subject: Subject) -> float:
        """Return next to nothing: sorting a few hundred numbers per layer is less than a forward pass."""
        return 0.1

    def check(self, subject: Subject) -> None:
        if not any(_scales(subject.anatomy.units)):
            raise DoesNotApply(
                "no layer has Context Broadcasting with learned scales"
                " (treatment context_broadcasting with scaled: true)."
            )

    def measure(self, subject: Subject) -> Result:
        found = list(_scales(subject.anatomy.units))
        rows, ratios = [], []
        for unit, scale in found:
            if not np.isfinite(scale).all():
                raise ModelError(f"the scales of {unit.name} are not finite (NaN or infinity).")
            values = {"mean": Scalar(value=float(scale.mean()))}
            ratio = quantile_ratio(scale)
            if ratio is not None:
                ratios.append(ratio)
                values["ratio"] = Scalar(value=ratio)
            rows.append(unit_row(unit, **values))
        scalars = {"mean": Scalar(value=float(np.mean([scale.mean() for _, scale in found])))}
        if ratios:
            scalars["ratio"] = Scalar(value=float(np.mean(ratios)))
        return Result(scalars, rows, _arrays([scale for _, scale in found]))


def _scales(units: tuple[Unit, ...]) -> Iterator[tuple[Unit, NDArray[np.float64]]]:
    """Yield each unit that has scales with its scales, those of several modules concatenated."""
    for unit in units:
        inside = () if unit.module is None else unit.module.modules()
        scales = (getattr(module, "context_scale", None) for module in inside)
        parts = [scale.detach().double().flatten() for scale in scales if isinstance(scale, Tensor)]
        if parts:
            yield unit, torch.cat(parts).cpu().numpy()


def _arrays(scales: list[NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return the scales as [layers, D], padded with NaN if layers differ in width."""
    width = max(len(scale) for scale in scales)
    return {"scales": np.stack([np.pad(s, (0, width - len(s)), constant_values=np.nan) for s in scales])}
