"""Over every family and library: finite numbers, or a sentence that says why not."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.subjects import noise
from vitclinic._core.errors import UnknownStructureError
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.families import recognise
from vitclinic.probes import Subject, measure, parse_probes

PROBES = ["attention_entropy", "softmax_jacobian", "attention_distance", "attention_maps", "cb_scale"]
WITH_ATTENTION = [
    name
    for name in NETWORKS
    if not any(part in name for part in ("resnet", "resnext", "convnext", "mixer", "resmlp", "gmlp", "gmixer"))
]


@pytest.mark.parametrize("name", [*WITH_ATTENTION, "torchvision resnet", "timm resnet with MSAs"])
def test_finite_numbers_or_a_sentence(name):
    torch.manual_seed(0)
    network = shaken(NETWORKS.get(name, NETWORKS.get(f"vitclinic {name}"))()).eval()
    core, family = recognise(network)
    channels, height, width = family.input_size(core)
    dataset = noise(3)
    images = dataset.splits["test"].images
    images.pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, channels), dtype=np.uint8)
    patient = Subject(network, dataclasses.replace(dataset, size=(height, width), channels=channels), batch_size=2)
    try:
        attends = any(unit.attention for unit in Anatomy.of(network).units)
    except UnknownStructureError:
        attends = False
    for measurement in measure(patient, parse_probes(PROBES)):
        applies = attends and measurement.probe != "cb_scale"
        assert measurement.status == ("ok" if applies else "does_not_apply"), measurement.reason
        numbers = [*measurement.scalars.values(), *(s for row in measurement.units for s in row.values.values())]
        assert all(np.isfinite(scalar.value) for scalar in numbers)
        if measurement.probe == "attention_entropy" and applies:
            for row in measurement.units:
                assert 0 <= row.values["entropy"].value <= row.values["maximum"].value * (1 + 1e-5)
