"""Accuracy, likelihood and calibration: by hand, against torchmetrics, and whatever the batch."""

import math

import numpy as np
import pytest
import torch
import torchmetrics.functional.classification as reference
from scipy import stats
from torch import nn

from tests.probes.subjects import noise, subject
from vitclinic._core.statistics import share_interval
from vitclinic.data import Batch
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.behaviour.accuracy import Reliability, ranks


class Saying(nn.Module):
    """Gives the logits that it was told, image by image."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.at = logits, 0

    def forward(self, x):
        if len(x) == 1:  # what it returns is looked at image by image, before it is measured
            return self.logits[:1]
        rows = [(self.at + row) % len(self.logits) for row in range(len(x))]
        self.at += len(x)
        return self.logits[rows]


def exam(logits, batch_size=8, **options):
    network = Saying(logits)
    patient = Subject(network, noise(len(logits), logits.shape[1]), batch_size=batch_size)
    assert patient.outputs == logits.shape[1]
    network.at = 0
    (found,) = measure(patient, parse_probes([{"accuracy": options}]))
    assert found.status == "ok", found.reason
    return found, torch.from_numpy(patient.images.labels)


def test_four_predictions_by_hand():
    third, sure = math.log(2.0), math.log(9.0)
    logits = torch.tensor([[third, 0], [0, sure], [sure, 0], [0, third]])  # confidences 2/3, 0.9, 0.9, 2/3
    found, labels = exam(logits, bins=5)  # labels 0 1 0 1: all right
    assert labels.tolist() == [0, 1, 0, 1]
    values = {name: scalar.value for name, scalar in found.scalars.items()}
    assert values == pytest.approx(
        {
            "accuracy": 1.0,
            "nll": -(math.log(2 / 3) + math.log(0.9)) / 2,
            "ece": 0.5 * (1 / 3) + 0.5 * 0.1,
            "confidence": (2 / 3 + 0.9) / 2,
            "commonest": 0.5,
        }
    )
    assert found.arrays["bin_images"].tolist() == [0, 0, 0, 2, 2]
    assert found.arrays["bin_confidence"][3:] == pytest.approx([2 / 3, 0.9])
    assert np.isnan(found.arrays["bin_accuracy"][:3]).all()
    low, high = share_interval(2, 2)
    assert (found.arrays["bin_accuracy_low"][3], found.arrays["bin_accuracy_high"][3]) == (low, high)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_equals_torchmetrics(bins):
    torch.manual_seed(0)
    logits = torch.randn(101, 7, dtype=torch.float64) * 2
    labels = torch.arange(101) % 7
    logits[torch.arange(101), labels] += 1.5
    found, seen = exam(logits, bins=bins)
    assert torch.equal(seen, labels)
    scalars = found.scalars
    p = logits.softmax(1)
    ece = reference.multiclass_calibration_error(p, labels, 7, n_bins=bins, norm="l1")
    assert scalars["ece"].value == pytest.approx(float(ece), abs=1e-6)
    for name, k in (("accuracy", 1), ("top5_accuracy", 5)):
        share = reference.multiclass_accuracy(p, labels, 7, average="micro", top_k=k)
        assert scalars[name].value == pytest.approx(float(share), abs=1e-6)
        assert (scalars[name].low, scalars[name].high) == share_interval(round(float(share) * 101), 101)
    each = -p.log()[torch.arange(101), labels].numpy()
    low, high = stats.t.interval(0.95, 100, each.mean(), stats.sem(each))
    assert (scalars["nll"].value, scalars["nll"].low, scalars["nll"].high) == pytest.approx((each.mean(), low, high))


def test_the_interval_of_the_calibration_error_covers_it():
    """Confidences of 0.8 and of 0.6 with accuracies of 0.6 and 0.65: an ECE of 0.125."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        sure = random.random(400) < 0.5
        reliability = Reliability(10)
        reliability.add(np.where(sure, 0.79, 0.59), random.random(400) < np.where(sure, 0.59, 0.65))
        error = reliability.error()
        inside += error.low <= 0.5 * 0.2 + 0.5 * 0.06 <= error.high
    assert 0.9 < inside / 300 < 0.99


@pytest.mark.parametrize("n", [50, 1000])
def test_the_interval_of_a_calibrated_network_holds_zero(n):
    random = np.random.default_rng(1)
    above = 0
    for _ in range(300):
        confidence = random.uniform(0.4, 1, n)
        reliability = Reliability(15)
        reliability.add(confidence, random.random(n) < confidence)
        above += reliability.error().low > 0
    assert above / 300 <= 0.05


def test_the_upper_end_is_that_of_a_mean():
    random = np.random.default_rng(2)
    confidence, correct = random.uniform(0.9, 1, 500), random.random(500) < 0.6
    reliability = Reliability(1)
    reliability.add(confidence, correct)
    error = reliability.error()
    low, high = stats.t.interval(0.95, 499, error.value, stats.sem(confidence - correct))
    assert error.high == pytest.approx(high)
    assert error.low == pytest.approx(low)  # chance alone gives less here


def test_a_bin_has_its_upper_edge_and_certainty_is_in_the_last():
    reliability = Reliability(5)
    reliability.add(np.array([0.2, 0.4, 0.41, 1.0]), np.array([True, True, False, True]))
    assert reliability.counts.tolist() == [1, 1, 1, 0, 1]


def test_ranks_are_places_in_a_stable_sort():
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (50, 9)).double()  # many ties
    labels = torch.randint(0, 9, (50,))
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")
    assert ranks(logits, labels).tolist() == [row.tolist().index(y) for row, y in zip(order, labels, strict=True)]
    assert torch.equal(ranks(logits, labels) == 0, logits.argmax(1) == labels)


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_the_batch_size_changes_nothing(batch_size):
    (expected,) = measure(subject("unknown"), parse_probes(["accuracy"]))
    (found,) = measure(subject("unknown", batch_size=batch_size), parse_probes(["accuracy"]))
    assert found.scalars["accuracy"] == expected.scalars["accuracy"]
    for name, scalar in expected.scalars.items():
        assert found.scalars[name].value == pytest.approx(scalar.value, rel=1e-6)


def test_odd_networks():
    found, _ = exam(torch.tensor([[3.0]]))  # one class, one image
    assert {name: scalar.value for name, scalar in found.scalars.items()} == pytest.approx(
        {"accuracy": 1, "nll": 0, "ece": 0, "confidence": 1, "commonest": 1}
    )
    extreme, _ = exam(torch.tensor([[1e30, -1e30], [1e30, -1e30]]))  # the second label is 1
    assert extreme.scalars["nll"].value == pytest.approx(1e30)
    patient = subject(Saying(torch.full((22, 5), math.nan)))
    (found,) = measure(patient, parse_probes(["accuracy"]))
    assert found.status == "failed"
    assert found.reason == "network returns logits that are not finite (NaN or infinity)."


def test_processes_that_divide_the_images_find_the_same():
    """The sums of two shares, put together, are those of all images."""
    torch.manual_seed(0)
    logits, labels = torch.randn(31, 7), torch.arange(31) % 7
    (probe,) = parse_probes([{"accuracy": {"bins": 4}}])
    patient = Subject(Saying(logits), noise(31, 7))

    def tallied(rows):
        tally = probe.begin(patient)
        tally.end_batch(Batch(torch.zeros(len(rows), 3, 16, 16), labels[rows], rows, rows), logits[rows])
        return tally

    whole, one, other = (tallied(torch.arange(*ends)) for ends in ((0, 31), (0, 12), (12, 31)))
    for name, sum_ in one.sums().items():
        sum_.merge(other.sums()[name])
    found, expected = one.finish(), whole.finish()
    assert found.scalars.keys() == expected.scalars.keys()
    for name, scalar in expected.scalars.items():
        assert found.scalars[name].model_dump() == pytest.approx(scalar.model_dump())
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], array)
