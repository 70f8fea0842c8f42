"""The likelihood of augmented training images against the stream that training reads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.probes.subjects import subject
from vitclinic.data import Augment, TrainingStream
from vitclinic.probes import Training, measure, parse_probes

MIXED = Training(Augment(level="light", mixup=0.8, smoothing=0.1), 0.0, frozenset())


def nll(patient, **options):
    (found,) = measure(patient, parse_probes([{"train_nll": options}]))
    assert found.status == "ok", found.reason
    return found


@pytest.mark.parametrize("batch_size", [8, 3, 64])
def test_equals_the_loss_of_training(batch_size):
    patient = subject("unknown", training=MIXED, seed=5, batch_size=batch_size)
    found = nll(patient, images=50)  # more than two showings of the 22 images
    batch = TrainingStream(patient.dataset, MIXED.augment, 5)[range(50)]
    patient.network.eval()
    with torch.no_grad():
        each = F.cross_entropy(patient.network(batch.images).double(), batch.targets.double(), reduction="none")
    assert found.scalars["nll"].value == pytest.approx(float(each.mean()), rel=1e-6)
    assert found.scalars["nll"].n == 50
    entropy = -(batch.targets.double() * batch.targets.double().log()).sum(1).mean()
    assert found.scalars["target_entropy"].value == pytest.approx(float(entropy), rel=1e-6)
    assert found.conditions["augment"]["mixup"] == 0.8


def test_without_a_known_training_each_image_once_as_it_is():
    patient = subject("unknown")
    found = nll(patient)
    (plain,) = measure(subject("unknown", split="train"), parse_probes(["accuracy"]))
    assert found.scalars["nll"].n == 22
    assert found.scalars["nll"].value == pytest.approx(plain.scalars["nll"].value, rel=1e-6)
    assert found.scalars["target_entropy"].value == 0
    assert found.conditions == {}
    unaugmented = nll(subject("unknown", training=MIXED), augment=False)
    assert unaugmented.scalars["nll"].value == pytest.approx(plain.scalars["nll"].value, rel=1e-6)


def test_it_says_what_it_costs():
    (probe,) = parse_probes([{"train_nll": {"images": 50}}])
    seen = []
    patient = subject("unknown", training=MIXED)
    patient.network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    view = probe.view(patient)
    assert view.outputs == 5
    seen.clear()
    measure(patient, [probe])
    assert np.sum(seen) == probe.forwards(view) == 50
