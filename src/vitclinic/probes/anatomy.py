"""The anatomy of a network, stored with its measurements so that a report can draw it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.anatomy.table import UnitFacts, count_outside, list_facts
from vitclinic.probes.probe import Need, OwningProbe, Result, register, unit_row
from vitclinic.probes.subject import Subject


@register
class AnatomyProbe(OwningProbe):
    """Units of a network: kinds, stages, grids, channels, parameters, attention maps, and what is not certain.

    It stores what `print(Anatomy.of(network))` shows: a row for each unit and, in the array `notes`, sentences on what
    one forward pass could not settle.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> row = AnatomyProbe()(model, [(torch.rand(8, 3, 32, 32), torch.arange(8))]).units[2]
        >>> row.name, row.kind, row.values["heads"].value, row.note
        ('blocks.0.msa', 'msa', 3.0, 'branch set to zero')
    """

    name = "anatomy"
    group = "Network"
    rank = 0
    title = "Anatomy"
    question = "What is it made of?"
    key_scalars: ClassVar[KeyScalars] = {"units": None, "stages": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    def forwards(self, subject: Subject) -> float:
        return 1.0

    def peak_memory(self, subject: Subject) -> float:
        return subject.footprint.forward(1)

    def measure(self, subject: Subject) -> Result:
        anatomy = subject.anatomy
        facts = list_facts(anatomy)
        scalars = {
            "units": len(facts),
            "stages": len({unit.stage for unit in facts}),
            "residual_units": sum(unit.residual for unit in facts),
            "attention_maps": sum(unit.attention for unit in facts),
            "removable_units": sum(unit.removal is not None for unit in facts),
            "parameters_outside_units": count_outside(anatomy),
            "observed": int(anatomy.observed),
        }
        rows = [
            unit_row(unit, known.removal, **_exact(_values(known)))
            for unit, known in zip(anatomy.units, facts, strict=True)
        ]
        texts = {
            "network": np.array(type(anatomy.network).__name__),
            "family": np.array(anatomy.family),
            "notes": np.array(anatomy.notes, dtype=np.str_),
        }
        return Result(_exact(scalars), rows, texts)


def _values(unit: UnitFacts) -> dict[str, int]:
    """Return the numbers of a unit, without those that are not known."""
    height, width = (None, None) if unit.grid is None else unit.grid
    values = {
        "grid_height": height,
        "grid_width": width,
        "prefix_tokens": None if unit.grid is None else unit.prefix,
        "channels": unit.channels,
        "parameters": unit.parameters,
        "residual": int(unit.residual),
        "attention_map": int(unit.attention),
        "heads": unit.heads,
        "removable": int(unit.removal is not None),
    }
    return {name: value for name, value in values.items() if value is not None}


def _exact(values: dict[str, int]) -> dict[str, Scalar]:
    return {name: Scalar(value=float(value)) for name, value in values.items()}
