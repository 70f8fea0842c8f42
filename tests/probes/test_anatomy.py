"""The probe `anatomy` stores what an anatomy shows."""

import numpy as np
import torch

from tests.anatomy.handwritten import FlipAveraged, LinearPatchViT
from tests.probes.subjects import subject
from vitclinic._core.records import Measurement
from vitclinic.anatomy.table import count_outside, list_facts
from vitclinic.probes import AnatomyProbe, measure, parse_probes


def anatomy(patient):
    (measurement,) = measure(patient, parse_probes(["anatomy"]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def test_rows_are_the_units_with_their_facts():
    patient = subject("vit")
    found = anatomy(patient)
    assert [(row.name, row.kind, row.stage, row.depth) for row in found.units] == [
        (unit.name, unit.kind, unit.stage, unit.depth) for unit in patient.anatomy.units
    ]
    for row, facts in zip(found.units, list_facts(patient.anatomy), strict=True):
        values = {name: scalar.value for name, scalar in row.values.items()}
        assert row.note == facts.removal
        assert values["parameters"] == facts.parameters
        assert values.get("channels") == facts.channels
        assert (values["residual"], values["attention_map"]) == (facts.residual, facts.attention)
        assert values.get("heads") == facts.heads
        grid = None if "grid_height" not in values else (values["grid_height"], values["grid_width"])
        assert grid == facts.grid
    attention = found.units[2]
    assert attention.name == "blocks.0.msa"
    assert {name: scalar.value for name, scalar in attention.values.items()} == {
        **{"grid_height": 4, "grid_width": 4, "prefix_tokens": 1, "channels": 24, "heads": 2},
        **{"parameters": 4 * 24 * 24 + 4 * 24 + 2 * 24, "residual": 1, "attention_map": 1, "removable": 1},
    }


def test_scalars_count():
    patient = subject("vit")
    scalars = {name: scalar.value for name, scalar in anatomy(patient).scalars.items()}
    assert scalars == {
        **{"units": 9, "stages": 1, "residual_units": 6, "attention_maps": 3, "removable_units": 7, "observed": 0},
        "parameters_outside_units": count_outside(patient.anatomy),
    }


def test_doubts_are_stored_and_read_back(tmp_path):
    loader = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
    found = AnatomyProbe()(FlipAveraged(LinearPatchViT()), loader)
    assert found.scalars["observed"].value == 1
    assert "runs 2 times" in str(found.arrays["notes"][0])
    found.write(tmp_path / "anatomy.json")
    again = Measurement.read(tmp_path / "anatomy.json")
    assert again == found
    assert np.array_equal(again.arrays["notes"], found.arrays["notes"])
    assert str(again.arrays["family"]) == "LinearPatchViT"


def test_a_network_without_doubts_has_an_empty_list_of_them(tmp_path):
    found = anatomy(subject("resnet"))
    found.write(tmp_path / "anatomy.json")
    assert Measurement.read(tmp_path / "anatomy.json").arrays["notes"].tolist() == []
