"""Accuracy under corruptions: against a loop over single images, whatever the batch, and after an interruption."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.probes.subjects import InMemory
from vitclinic._core.statistics import share_interval
from vitclinic.data import Dataset, Split
from vitclinic.data.corruptions import FIFTEEN, NINETEEN, SEVERITIES, corrupt
from vitclinic.probes import Corruptions, Subject, measure
from vitclinic.probes.guards import Partial


def pictures(count=12, side=32, channels=3, classes=3, names=None):
    """Smooth blobs; every source split has rows of its own."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (count * 2, 4, 4, channels))
    images = InMemory(0)
    images.pixels = np.kron(coarse, np.ones((1, side // 4, side // 4, 1))).astype(np.uint8)
    rows = np.arange(count * 2)
    labels = rows % classes
    splits = {"train": Split(images, rows[:count], labels[:count]), "val": Split(images, rows[:0], labels[:0])}
    splits["test"] = Split(images, rows[count:], labels[count:])
    names = names or tuple(f"class {number}" for number in range(classes))
    return Dataset("blobs", names, (side, side), channels, splits, f"blobs {count} {side}")


class Fragile(nn.Module):
    """Looks at single pixels and at the spread of all: most corruptions change its mind."""

    def __init__(self, channels=3, classes=3):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(channels * 16 + 1, classes)
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        spread = x.flatten(1).std(1, keepdim=True) * 4
        return self.head(torch.cat([nn.functional.interpolate(x, size=4).flatten(1) * 3, spread.to(x.dtype)], 1))


def subject(network=None, dataset=None, **options):
    return Subject(network or Fragile(), dataset or pictures(), **{"batch_size": 5, **options})


def by_loop(patient, names):
    """[corruptions, severities, images], one image at a time."""
    correct = np.zeros((len(names), len(SEVERITIES), len(patient)))
    for number, row in enumerate(patient.images.rows):
        pixels = patient.images.images.pixels[row].astype(np.float32) / 255
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        for at, name in enumerate(names):
            for severity in SEVERITIES:
                seen = corrupt(image, name, severity, indices=[row], seed=patient.seed)
                correct[at, severity - 1, number] = patient.network(seen).argmax() == patient.images.labels[number]
    return correct


@pytest.mark.parametrize(("kinds", "names"), [(15, FIFTEEN), (19, NINETEEN)])
def test_equals_a_loop_over_single_images(kinds, names):
    patient = subject(seed=3)
    (found,) = measure(patient, [Corruptions(kinds=kinds)])
    expected = by_loop(patient, names)
    assert found.status == "ok", found.reason
    assert 0.1 < expected.mean() < 0.9
    assert np.unique(expected.mean(2)).size > 2
    assert found.scalars["accuracy"].value == pytest.approx(expected.mean())
    np.testing.assert_allclose(found.arrays["accuracy"], expected.mean(2))
    for name, correct in zip(names, expected, strict=True):
        assert found.scalars[f"accuracy_{name}"].value == pytest.approx(correct.mean())
    shares = expected.mean((0, 1))
    half = 2.2010 * shares.std(ddof=1) / np.sqrt(12)  # Student's t with 11 degrees of freedom
    assert found.scalars["accuracy"].high == pytest.approx(min(1, expected.mean() + half), abs=1e-4)
    assert found.scalars["accuracy"].n == 12
    interval = found.arrays["low"][0, 0], found.arrays["high"][0, 0]
    assert interval == pytest.approx(share_interval(int(expected[0, 0].sum()), 12))
    drop = found.scalars["clean_accuracy"].value - found.scalars["accuracy"].value
    assert found.scalars["drop"].value == pytest.approx(drop)


def test_a_network_that_sees_nothing_loses_nothing():
    class Blind(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3)

    (found,) = measure(subject(Blind()), [Corruptions()])
    assert (found.arrays["accuracy"] == 1 / 3).all()
    drop = found.scalars["drop"]
    assert drop.value == 0
    assert drop.high == -drop.low == pytest.approx(1 - share_interval(drop.n, drop.n)[0])


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_batch_size_changes_nothing(batch_size):
    (found,) = measure(subject(batch_size=batch_size), [Corruptions()])
    (expected,) = measure(subject(), [Corruptions()])
    assert found.scalars == expected.scalars
    assert (found.arrays["accuracy"] == expected.arrays["accuracy"]).all()


def test_fewer_images_are_the_same_ones_with_the_same_corruptions():
    whole = subject()
    probe = Corruptions(images=6)
    part = probe.view(whole)
    assert len(part) == 6
    (found,) = measure(whole, [probe])
    chosen = np.isin(whole.images.rows, part.images.rows)
    np.testing.assert_allclose(found.arrays["accuracy"], by_loop(whole, FIFTEEN)[..., chosen].mean(2))
    limited = subject(limit=4)
    assert probe.view(limited) is limited


def test_it_says_what_it_costs():
    network = Fragile()
    patient = subject(network)
    probe = Corruptions(kinds=19, images=7)
    estimate = probe.forwards(probe.view(patient))
    probe.view(patient).outputs  # noqa: B018 (the first call of the network, made by any probe that needs labels)
    network.seen = 0
    measure(patient, [probe])
    assert network.seen == estimate == 7 * (19 * 5 + 1)


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("vitclinic.probes.behaviour.corruptions.SAVED_EVERY", 0.0)
    network, path = Fragile(), tmp_path / "corruptions.partial"

    def stop(what, done, total):
        assert (what, total) == ("corruptions", 12 * 76)
        if done >= 500:
            raise KeyboardInterrupt

    patient = subject(network, scratch={"corruptions": path}, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        measure(patient, [Corruptions()])
    assert path.exists()
    again = subject(network, scratch={"corruptions": path})
    again.outputs  # noqa: B018
    network.seen = 0
    (found,) = measure(again, [Corruptions()])
    assert network.seen <= 12 * 76 - 500 + 5
    (expected,) = measure(subject(), [Corruptions()])
    assert found.scalars == expected.scalars
    other = subject(network, scratch={"corruptions": path}, seed=1)
    assert Partial(path, f"15 1 {other.data_digest}").read() is None  # what another seed gave is not taken


def test_grey_images_and_other_precisions():
    (found,) = measure(subject(Fragile(1), pictures(channels=1)), [Corruptions()])
    assert found.status == "ok", found.reason
    (found,) = measure(subject(Fragile().to(torch.bfloat16)), [Corruptions()])
    assert found.status == "ok", found.reason


def test_what_cannot_be_measured_is_said():
    (found,) = measure(subject(dataset=pictures(side=16)), [Corruptions()])
    assert found.status == "does_not_apply"
    assert found.reason == "corruptions need images of at least 32 pixels a side, and these are 16 x 16."
    broken = Fragile()
    nn.init.constant_(broken.head.weight, float("nan"))
    (found,) = measure(subject(broken), [Corruptions()])
    assert found.status == "failed"
    assert "not finite" in found.reason
    (found,) = measure(subject(dataset=pictures(classes=4)), [Corruptions()])
    assert found.status == "does_not_apply"


def test_one_image_is_enough():
    (found,) = measure(subject(limit=1), [Corruptions()])
    assert found.status == "ok", found.reason
    assert found.scalars["accuracy"].high - found.scalars["accuracy"].low > 0.7


@pytest.mark.parametrize(("side", "channels", "shape"), [(32, 3, (32, 32, 3)), (96, 1, (64, 64))])
def test_a_sample_of_each_corruption_is_kept_and_is_small(side, channels, shape):
    patient = subject(Fragile(channels), pictures(3, side, channels))
    (found,) = measure(patient, [Corruptions(images=2)])
    samples = found.arrays["samples"]
    assert samples.shape == (1 + len(FIFTEEN), *shape)
    assert samples.dtype == np.uint8
    if side == 32:
        row = patient.on("test", 2).images.rows[0]
        pixels = patient.images.images.pixels[row]
        np.testing.assert_array_equal(samples[0], pixels)
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
        fog = corrupt(image, "fog", 3, indices=[row], seed=patient.seed)
        expected = (fog[0].permute(1, 2, 0) * 255).round().byte().numpy()
        np.testing.assert_array_equal(samples[1 + FIFTEEN.index("fog")], expected)
