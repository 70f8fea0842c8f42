"""Norms of weights and of activations [chen2022 Table 4]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vitclinic._core.errors import ModelError, UnknownStructureError
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Anatomy, Site
from vitclinic.anatomy.table import parameters_by_unit
from vitclinic.probes.digest import find_integer_weights, find_packed_weights
from vitclinic.probes.probe import (
    DoesNotApply,
    Result,
    StreamingProbe,
    Tally,
    check_finite,
    mean_scalar,
    register,
    unit_row,
)
from vitclinic.probes.subject import Subject


@register
class Norms(StreamingProbe):
    """L2 norms of the weights, in total and per unit, and of the state after each unit [chen2022 Table 4].

    |w|_2 is over all parameters. |a_k|_2 is the norm of the state after unit k (after its residual addition) over all
    tokens (or positions) and channels of one image, averaged over images. A network of unknown structure has only the
    norm of all its weights.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> [row.name for row in Norms()(model, loader).units[2:4]]
        ['blocks.0.msa', 'blocks.0.mlp']
    """

    name = "norms"
    group = "Network"
    rank = 30
    title = "Norms"
    question = "How large are its weights and activations?"
    paper = "Chen et al. 2022, Table 4 (C5)"
    key_scalars: ClassVar[KeyScalars] = {"weight_norm": None, "activation_norm_last": None}

    def begin(self, subject: Subject) -> Tally:
        if found := find_integer_weights(subject.network):
            raise DoesNotApply(
                f"{next(iter(found))} holds integers with a scale of their layer's own ({len(found)} such tensors), so"
                " that the norm of the weights is not known."
            )
        return _Tally(subject)


class _Tally(Tally):
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.anatomy = _find_anatomy(subject)
        self.units = () if self.anatomy is None else self.anatomy.units
        self.by_name = {unit.name: unit for unit in self.units}
        self.norms = {unit.name: RunningMean() for unit in self.units}

    def taps(self) -> Mapping[str, Site]:
        return {unit.name: unit.output for unit in self.units}

    def update(self, key: str, activation: Tensor) -> None:
        norms = activation_norm(activation).cpu().numpy()
        check_finite(norms, self.by_name[key])
        self.norms[key].add(norms)

    def sums(self) -> Mapping[str, RunningMean]:
        return self.norms

    def finish(self) -> Result:
        everything = [*self.subject.network.parameters(), *find_packed_weights(self.subject.network)]
        if self.anatomy is None:
            return Result({"weight_norm": _exact(everything)})
        owned = parameters_by_unit(self.anatomy)
        inside = {id(parameter) for parameters in owned.values() for parameter in parameters}
        outside = [parameter for parameter in everything if id(parameter) not in inside]
        rows = [
            unit_row(unit, weight_norm=_exact(owned[unit.name]), activation_norm=mean_scalar(self.norms[unit.name]))
            for unit in self.units
        ]
        scalars = {"weight_norm": _exact(everything), "weight_norm_outside_units": _exact(outside)}
        return Result(scalars | self._blocks(self.anatomy), rows)

    def _blocks(self, anatomy: Anatomy) -> dict[str, Scalar]:
        """Return the norms after the first, middle and last block: blocks 1, 6 and 12 of twelve, as in Table 4."""
        last_units = [block.units[-1].name for block in anatomy.blocks]
        if not last_units:
            return {}
        picked = {"first": 0, "middle": (len(last_units) - 1) // 2, "last": -1}
        return {f"activation_norm_{place}": mean_scalar(self.norms[last_units[at]]) for place, at in picked.items()}


def _find_anatomy(subject: Subject) -> Anatomy | None:
    try:
        return subject.anatomy
    except UnknownStructureError:
        return None


def activation_norm(activation: Tensor) -> Tensor:
    """Return the l2 norm of each image's activation [B, ...], [B] in float64."""
    norms: Tensor = torch.linalg.vector_norm(activation.flatten(1), dim=1, dtype=torch.float64)
    return norms


@torch.no_grad()
def weight_norm(parameters: Iterable[Tensor]) -> float:
    """Return the l2 norm of all parameters together, summed in float64."""
    values = (parameter.dequantize() if parameter.is_quantized else parameter for parameter in parameters)
    return math.sqrt(math.fsum(float(value.double().square().sum()) for value in values))


def _exact(parameters: Iterable[Tensor]) -> Scalar:
    norm = weight_norm(parameters)
    if not math.isfinite(norm):
        raise ModelError("the weights are not finite (NaN or infinity).")
    return Scalar(value=norm)
