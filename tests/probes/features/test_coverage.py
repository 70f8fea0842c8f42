"""Over every family and library: finite numbers, or a sentence that says why not."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.subjects import noise
from vitclinic.anatomy.families import recognise
from vitclinic.probes import Subject, measure, parse_probes

PROBES = ["cka", "token_similarity", "token_norms", "sparsity", {"lesion": {"images": 4}}]
IMAGES = 4


@pytest.mark.parametrize("name", NETWORKS)
def test_finite_numbers_or_a_sentence(name):
    torch.manual_seed(0)
    network = shaken(NETWORKS[name]()).eval()
    core, family = recognise(network)
    channels, height, width = family.input_size(core)
    with torch.no_grad():
        outputs = network(torch.rand(1, channels, height, width, generator=torch.Generator().manual_seed(0)))
    dataset = noise(IMAGES, classes=getattr(outputs, "logits", outputs).shape[1])
    images = dataset.splits["test"].images
    images.pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, height, width, channels), dtype=np.uint8)
    patient = Subject(network, dataclasses.replace(dataset, size=(height, width), channels=channels), batch_size=IMAGES)
    for measurement in measure(patient, parse_probes(PROBES)):
        assert measurement.status in ("ok", "does_not_apply"), f"{measurement.probe}: {measurement.reason}"
        numbers = [*measurement.scalars.values(), *(s for row in measurement.units for s in row.values.values())]
        assert all(np.isfinite(scalar.value) for scalar in numbers), measurement.probe
        assert numbers or str(measurement.reason).endswith(".")
