"""What a network costs, against formulas written by hand."""

import pytest
import torch
import torchvision
from torch import nn

from tests.probes.subjects import CLASSES, SIZE, Unknown, subject, vit
from vitclinic.models.cost import peak_bytes
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.cost import flops


def vit_flops(image, patch, width, depth, classes, ratio=4):
    """Two for each multiply-add: stem, then qkv, scores, mixing, projection and MLP of each block, head."""
    patches = (image // patch) ** 2
    tokens = patches + 1
    stem = patches * width * 3 * patch**2
    attention = tokens * width * 3 * width + 2 * tokens * tokens * width + tokens * width * width
    mlp = 2 * tokens * width * ratio * width
    return 2 * (stem + depth * (attention + mlp) + width * classes)


def test_flops_of_a_vit_against_the_formula():
    patient = subject("vit")
    assert flops(patient, patient.example) == vit_flops(SIZE, 4, 24, 3, CLASSES)


def test_attention_that_hides_in_a_fast_path_is_counted():
    network = torchvision.models.VisionTransformer(SIZE, 4, 2, 2, 16, 64, num_classes=CLASSES)
    patient = subject(network.eval())
    assert flops(patient, patient.example) == vit_flops(SIZE, 4, 16, 2, CLASSES)


def test_counts_and_options():
    patient = subject("vit")
    (measurement,) = measure(patient, parse_probes([{"cost": {"repeats": 7, "batch": 4}}]))
    scalars = measurement.scalars
    assert measurement.config == {"repeats": 7, "batch": 4}
    assert scalars["parameters"].value == sum(p.numel() for p in vit().parameters())
    assert scalars["flops"].value == vit_flops(SIZE, 4, 24, 3, CLASSES)
    assert scalars["batch"].value == 4
    assert measurement.arrays["seconds"].shape == (7, 2)
    rates = 4 / measurement.arrays["seconds"][:, 1]
    assert scalars["images_per_second"].value == pytest.approx(sorted(rates)[3])
    assert (scalars["images_per_second"].low, scalars["images_per_second"].high) == (min(rates), max(rates))
    assert measurement.conditions["threads"] == torch.get_num_threads()


def test_a_batch_larger_than_the_data_repeats_images():
    (measurement,) = measure(subject(Unknown(), count=3, batch_size=64), parse_probes(["cost"]))
    assert measurement.scalars["batch"].value == 32


def test_peak_memory_by_hand():
    layers = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 500), nn.ReLU())
    x = torch.rand(16, 1000)
    with torch.no_grad():  # the widest moment is where the input and the output of the second layer live together
        assert peak_bytes(lambda: layers(x), torch.device("cpu")) == 16 * (2000 + 500) * 4


def test_views_and_in_place_operations_take_no_memory():
    x = torch.rand(16, 1000)
    assert peak_bytes(lambda: x.view(1000, 16).t()[:5].mul_(2), torch.device("cpu")) == 0
    kept = []
    assert peak_bytes(lambda: kept.extend([x + 1, x + 2]), torch.device("cpu")) == 2 * x.nbytes


def test_peak_memory_holds_weights_input_and_activations():
    patient = subject(Unknown())
    (measurement,) = measure(patient, parse_probes([{"cost": {"batch": 8, "repeats": 1}}]))
    weights = sum(t.nbytes for t in (*patient.network.parameters(), *patient.network.buffers()))
    peak = measurement.scalars["peak_memory_bytes"].value
    assert peak > weights + 8 * 3 * SIZE * SIZE * 4 + 8 * 6 * 7 * 7 * 4
    (twice,) = measure(patient, parse_probes([{"cost": {"batch": 4, "repeats": 1}}]))
    assert peak - weights == pytest.approx(2 * (twice.scalars["peak_memory_bytes"].value - weights), rel=0.01)


def test_the_estimate_knows_that_batches_are_capped():
    (probe,) = parse_probes([{"cost": {"repeats": 7, "batch": 32}}])
    assert probe.forwards(subject("vit", batch_size=4)) == 9 * (4 + 8) + 16
