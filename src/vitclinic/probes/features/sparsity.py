"""Active neurons: the share of positive values after an activation function [chen2022 Fig. 2]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Site, Unit
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

_VALUES = 2**18
"""Values compared at once on a CPU: more would need fresh memory from the system, which costs more than comparing."""


def active_share(activation: Tensor) -> Tensor:
    """Return the share of values above zero in each image [B], in float32; NaN if a value is not finite.

    Example:
        >>> active_share(torch.tensor([[1.0, -0.1, 0.0, 2.0], [-1.0, -1.0, -1.0, 3.0]])).tolist()
        [0.5, 0.25]
    """
    values = activation.detach().flatten(1)
    if not values.sum(dtype=torch.float32).isfinite():
        return torch.where(values.isfinite().all(dim=1), _shares(values), torch.nan)
    return _shares(values)


def _shares(values: Tensor) -> Tensor:
    on_cpu = values.device.type == "cpu"
    images = max(1, _VALUES // max(1, values.shape[1])) if on_cpu else len(values)
    counts = [_positive(piece) for piece in torch.split(values, images)]
    return torch.cat(counts) / values.shape[1]


def _positive(values: Tensor) -> Tensor:
    # Comparing into floats is twice as fast as summing booleans, and counts up to 2^24 are exact.
    return torch.gt(values, 0, out=torch.empty(values.shape, device=values.device)).sum(dim=1)


@register
class Sparsity(StreamingProbe):
    """Share of active neurons after the activation function of each MLP or conv block [chen2022 Fig. 2].

    A neuron is one hidden channel of one token (or position); it is active for an image if its value is greater than 0.
    The share of active neurons is averaged over images.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> 0 < Sparsity()(model, loader).scalars["active"].value < 1
        True
    """

    name = "sparsity"
    group = "Representation"
    rank = 80
    title = "Active neurons"
    question = "Which share of the neurons is active in each layer?"
    paper = "Chen et al. 2022, Fig. 2 right (C5, C15)"
    key_scalars: ClassVar[KeyScalars] = {"active": None, "active_first": None}
    figures = (
        FigureSpec(
            name="sparsity-depth",
            kind="layers",
            values={"active": "active neurons"},
            axis="unit with an activation function",
            share=True,
            title="Active neurons by depth",
            reading="Each point is the share of hidden values behind a unit's activation function that are greater"
            " than zero, averaged over images. Chen et al. found below 10% in most layers of a ViT, far more in"
            " ResNet and Mixer, and fewer in the first layers after training with SAM.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    def begin(self, subject: Subject) -> Tally:
        sites = {unit: unit.activation for unit in subject.anatomy.units if unit.activation is not None}
        if not sites:
            raise DoesNotApply(f"no unit of this {subject.anatomy.family} has a known activation function.")
        return _Tally(sites)


class _Tally(Tally):
    def __init__(self, sites: Mapping[Unit, Site]) -> None:
        self.sites = sites
        self.shares = {unit: RunningMean() for unit in sites}
        self.network = RunningMean()
        self._batch: dict[Unit, Tensor] = {}

    def taps(self) -> Mapping[Unit, Site]:
        return self.sites

    def update(self, key: Unit, activation: Tensor) -> None:
        self._batch[key] = active_share(activation)

    def end_batch(self, *_: object) -> None:
        shares_ub = torch.stack([self._batch[unit] for unit in self.sites]).double().cpu().numpy()
        for unit, shares_b in zip(self.sites, shares_ub, strict=True):
            check_finite(shares_b, unit)
            self.shares[unit].add(shares_b)
        self.network.add(shares_ub.mean(axis=0))

    def sums(self) -> dict[str, RunningMean]:
        return {"network": self.network, **{unit.name: share for unit, share in self.shares.items()}}

    def finish(self) -> Result:
        rows = [unit_row(unit, active=mean_scalar(mean)) for unit, mean in self.shares.items()]
        first, last = rows[0].values["active"], rows[-1].values["active"]
        return Result({"active": mean_scalar(self.network), "active_first": first, "active_last": last}, rows)
