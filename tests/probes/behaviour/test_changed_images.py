"""Occlusion, frequency noise and midpoints: against loops over single images, whatever the batch."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from tests.probes.behaviour.trained import cnn, digits, subject, trained
from vitclinic._core.errors import RecipeError
from vitclinic._core.statistics import paired_share_interval, share_interval
from vitclinic.data import Dataset, Split
from vitclinic.data.corruptions.noise import Draws
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.behaviour.frequency_noise import mean_drop, rings, unit_noise
from vitclinic.probes.behaviour.missing_rate import draw_pairs
from vitclinic.probes.behaviour.occlusion import occlude


def found_by(name, patient, **options):
    (found,) = measure(patient, parse_probes([{name: options}]))
    assert found.status == "ok", found.reason
    return found


def singles(patient):
    """Images one by one as [H, W] arrays in float64, their labels and rows."""
    for number, row in enumerate(patient.images.rows):
        yield patient.images.images.read(np.array([row]))[0, :, :, 0] / 255.0, patient.images.labels[number], row


def taken_for(network, pixels):
    with torch.no_grad():
        return int(network(torch.from_numpy(pixels).float()[None, None]).argmax())


def as_counts(scalar):
    return round(scalar.value * scalar.n), scalar.n


@pytest.mark.parametrize(("value", "colour"), [("black", 0.0), ("mean", 0.3)])
@pytest.mark.parametrize("batch_size", [7, 64])
def test_occlusion_equals_a_loop(value, colour, batch_size):
    patient = subject(cnn, batch_size=batch_size, limit=100)
    found = found_by("occlusion", patient, value=value)
    clean, hidden = [], []
    for pixels, label, _ in singles(patient):
        clean.append(taken_for(patient.network, pixels) == label)
        pixels[2:6, 2:6] = colour  # 0.3 is the mean that the network subtracts
        hidden.append(taken_for(patient.network, pixels) == label)
    assert found.arrays["occluded"].tolist() == hidden
    assert found.arrays["clean"].tolist() == clean
    assert as_counts(found.scalars["accuracy"]) == (sum(hidden), 100)
    assert 0.1 < sum(hidden) / 100 < sum(clean) / 100
    lost = sum(c and not h for c, h in zip(clean, hidden, strict=True))
    gained = sum(h and not c for c, h in zip(clean, hidden, strict=True))
    drop = found.scalars["drop"]
    assert (drop.value, drop.low, drop.high) == ((lost - gained) / 100, *paired_share_interval(lost, gained, 100))


def test_the_hidden_square_is_central_and_half_as_wide():
    for height, width in ((224, 224), (8, 12), (7, 5), (1, 1)):
        hidden = occlude(torch.ones(1, 2, height, width), torch.tensor([0.0, 0.5]))
        assert (hidden[0, 0] == 0).sum() == max(1, height // 2) * max(1, width // 2)
        assert torch.equal(hidden[0, 0] == 0, hidden[0, 1] == 0.5)
        assert hidden[0, 0, (height - 1) // 2, (width - 1) // 2] == 0
    assert (hidden[0, 0] == 0).nonzero().tolist() == [[0, 0]]
    full = occlude(torch.ones(1, 1, 224, 224), torch.zeros(1))[0, 0]
    assert (full[56:168, 56:168] == 0).all()


def test_the_mean_of_a_network_that_says_nothing_is_that_of_the_training_images():
    network = trained(cnn)
    alike = nn.Sequential(network)  # no Normalized any more
    found = found_by("occlusion", Subject(alike, digits(), limit=100), value="mean")
    mean = digits().statistics[0][0]
    hidden = []
    for pixels, label, _ in singles(subject(cnn, limit=100)):
        pixels[2:6, 2:6] = mean
        hidden.append(taken_for(network, pixels) == label)
    assert found.arrays["occluded"].tolist() == hidden


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.02, 1.5))
@settings(deadline=None, max_examples=60)
def test_rings_partition_the_spectrum(height, width, thickness):
    ring = rings(height, width, thickness)
    assert ring.shape == (height, width)
    assert ring.min() == ring[0, 0] == 0
    for v in range(height):
        for h in range(width):
            # The wave of this frequency has this angular frequency, in pi, down and across.
            down, across = 2 * min(v, height - v) / height, 2 * min(h, width - h) / width
            distance = math.hypot(down, across)
            assert ring[v, h] * thickness <= distance + 1e-6
            assert distance < (ring[v, h] + 1) * thickness + 1e-6
    masks = [ring == number for number in np.unique(ring)]
    assert (np.sum(masks, axis=0) == 1).all()
    mirrored = ring[-np.arange(height) % height][:, -np.arange(width) % width]
    assert (ring == mirrored).all()  # so that the noise is real


@given(st.integers(1, 17), st.integers(1, 17), st.integers(0, 100))
@settings(deadline=None, max_examples=40)
def test_noise_stays_in_its_ring_and_has_its_size(height, width, seed):
    delta = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ring, whole = rings(height, width, 0.1), torch.zeros_like(delta)
    for number in np.unique(ring):
        mask = ring == number
        noise = unit_noise(delta, torch.from_numpy(mask))
        expected = np.fft.ifft2(np.fft.fft2(delta.numpy()) * mask)
        assert np.abs(expected.imag).max() < 1e-9
        size = np.sqrt((expected.real**2).mean((1, 2, 3), keepdims=True))
        np.testing.assert_allclose(noise.numpy(), expected.real / size, atol=1e-7)
        assert noise.square().mean((1, 2, 3)).tolist() == pytest.approx([1, 1])
        whole += noise * torch.from_numpy(size)
    torch.testing.assert_close(whole, delta)  # the parts of all rings are the noise


def test_frequency_noise_equals_a_loop():
    patient = subject(cnn, limit=60, seed=4)
    found = found_by("frequency_noise", patient, strength=0.3)
    ring = rings(8, 8, 0.1)
    clean, accuracy = [], {int(number): [] for number in np.unique(ring)}
    for pixels, label, row in singles(patient):
        clean.append(taken_for(patient.network, pixels) == label)
        delta = Draws("frequency_noise", 4, [row]).normal(1, 8, 8)[0, 0].double().numpy()
        for number, correct in accuracy.items():
            noise = np.fft.ifft2(np.fft.fft2(delta) * (ring == number)).real
            noisy = pixels + noise * 0.3 * 8 / np.linalg.norm(noise)
            correct.append(taken_for(patient.network, noisy) == label)
    shares = {number: np.mean(correct) for number, correct in accuracy.items()}
    assert min(shares.values()) < 0.8 < max(shares.values())
    for number in range(len(found.arrays["frequency"])):
        if number in shares:
            assert found.arrays["accuracy"][number] == pytest.approx(shares[number])
            assert found.arrays["drop"][number] == pytest.approx(np.mean(clean) - shares[number])
            low, high = found.arrays["drop_interval"][number]
            assert low <= found.arrays["drop"][number] <= high
        else:  # 8 pixels have no wave between 0 and pi/4
            assert math.isnan(found.arrays["accuracy"][number])
    assert found.arrays["frequencies"].sum() == 64
    low = [np.mean(clean) - share for number, share in shares.items() if number < 5]
    high = [np.mean(clean) - share for number, share in shares.items() if 5 <= number < 10]
    assert found.scalars["drop_low"].value == pytest.approx(np.mean(low))
    assert found.scalars["drop_high"].value == pytest.approx(np.mean(high))
    assert found.scalars["l2_norm"].value == pytest.approx(0.3 * 8)


@pytest.mark.parametrize(
    ("width", "scalars"),
    [(0.5, {"drop_low", "drop_high"}), (0.7, set()), (1.0, set()), (0.3, {"drop_low", "drop_high"})],
)
def test_a_ring_of_both_halves_is_in_neither(width, scalars):
    found = found_by("frequency_noise", subject(cnn, limit=10), width=width)
    assert {name for name in found.scalars if name.startswith("drop")} == scalars


def test_the_interval_of_a_mean_drop_is_over_images():
    clean = np.array([True, True, True, False, True])
    noisy = [np.array([True, False, True, False, True]), np.array([True, False, False, False, True])]
    drops = np.array([0, 1, 0.5, 0, 0])
    found = mean_drop(clean, noisy)
    low, high = stats.t.interval(0.95, 4, drops.mean(), stats.sem(drops))
    assert (found.value, found.low, found.high) == pytest.approx((0.3, low, high))


def test_images_that_are_all_alike_give_no_certainty():
    clean = np.ones(5, bool)
    found = mean_drop(clean, [clean, clean])
    assert found.value == 0
    assert found.high == -found.low == pytest.approx(1 - share_interval(5, 5)[0])


@pytest.mark.parametrize("batch_size", [1, 13, 200])
@pytest.mark.parametrize("name", ["frequency_noise", "missing_rate", "occlusion"])
def test_the_batch_size_changes_nothing(name, batch_size):
    options = {"pairs": 30} if name == "missing_rate" else {"images": 40}
    expected = found_by(name, subject(cnn), **options)
    found = found_by(name, subject(cnn, batch_size=batch_size), **options)
    for key, scalar in expected.scalars.items():
        assert found.scalars[key].value == pytest.approx(scalar.value, rel=1e-12)


def test_fewer_images_see_the_same_noise():
    whole, part = subject(cnn), subject(cnn, limit=20)
    (probe,) = parse_probes([{"frequency_noise": {"images": 20}}])
    assert probe.view(whole).images.rows.tolist() == part.images.rows.tolist()
    assert probe.view(part) is part
    assert found_by("frequency_noise", whole, images=20).scalars == found_by("frequency_noise", part).scalars


def test_missing_rate_equals_a_loop():
    patient = subject(cnn, seed=2)
    found = found_by("missing_rate", patient, pairs=100)
    view = patient.on("train", 200)
    images = [(pixels, label) for pixels, label, _ in singles(view)]
    first, second = draw_pairs(200, 2)
    missed, different = [], []
    for i, j in zip(first, second, strict=True):
        guess = taken_for(patient.network, (images[i][0] + images[j][0]) / 2)
        missed.append(guess not in (images[i][1], images[j][1]))
        different.append(images[i][1] != images[j][1])
    scalar = found.scalars["missing_rate"]
    assert as_counts(scalar) == (sum(missed), 100)
    assert 0 < sum(missed) < 100
    assert (scalar.low, scalar.high) == share_interval(sum(missed), 100)
    among = sum(m and d for m, d in zip(missed, different, strict=True))
    assert as_counts(found.scalars["missing_rate_different_classes"]) == (among, sum(different))
    assert as_counts(found.scalars["missing_rate_same_class"]) == (sum(missed) - among, 100 - sum(different))


@given(st.integers(0, 50), st.integers(0, 5))
def test_no_image_is_in_two_pairs(images, seed):
    first, second = draw_pairs(images, seed)
    assert len(first) == len(second) == images // 2
    assert len({*first, *second}) == 2 * (images // 2)
    assert all(0 <= row < images for row in (*first, *second))


def test_pairs_of_few_images():
    def with_train(count):
        split = digits().train
        few = Split(split.images, split.rows[:count], split.labels[:count])
        whole = digits()
        parts = {**whole.splits, "train": few}
        return Subject(trained(cnn), Dataset("few", whole.classes, (8, 8), 1, parts, f"few {count}"))

    assert found_by("missing_rate", with_train(3)).scalars["missing_rate"].n == 1
    (found,) = measure(with_train(1), parse_probes(["missing_rate"]))
    assert (found.status, found.reason) == (
        "does_not_apply",
        "there is only one training image, so there are no pairs.",
    )


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("missing_rate", {}, "it is measured on train images, and the data has none."),
        ("train_nll", {}, "it is measured on train images, and the data has none."),
        (
            "occlusion",
            {"value": "mean"},
            "no mean colour is known: the network has no normalization, and the data no train images.",
        ),
    ],
)
def test_data_without_training_images_is_no_failure(name, options, reason):
    """Such as the copies that `vitclinic corrupt` writes."""
    whole = digits()
    empty = Split(whole.train.images, whole.train.rows[:0], whole.train.labels[:0])
    data = Dataset("test only", whole.classes, (8, 8), 1, {**whole.splits, "train": empty, "val": empty}, "test only")
    (found,) = measure(Subject(nn.Sequential(trained(cnn)), data, limit=20), parse_probes([{name: options}]))
    assert (found.status, found.reason) == ("does_not_apply", reason)


def test_options_that_make_no_sense():
    with pytest.raises(RecipeError, match=r"'probes\.frequency_noise\.width'"):
        parse_probes([{"frequency_noise": {"width": 1e-12}}])  # more rings than memory


@pytest.mark.parametrize("name", ["frequency_noise", "missing_rate", "occlusion"])
def test_it_says_what_it_costs(name):
    patient = subject(cnn)
    (probe,) = parse_probes([{name: {"pairs": 10} if name == "missing_rate" else {"images": 20}}])
    view = probe.view(patient)
    assert view.outputs == 10
    seen = []
    hook = patient.network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    measure(patient, [probe])
    hook.remove()
    assert sum(seen) == probe.forwards(view)


@pytest.mark.parametrize("name", ["frequency_noise", "missing_rate", "occlusion", "fgsm"])
def test_networks_that_are_broken_or_coarse(name):
    network = copy.deepcopy(trained(cnn))
    with torch.no_grad():
        network.backbone[-1].bias[0] = math.nan
    (found,) = measure(Subject(network, digits()), parse_probes([name]))
    assert found.status == "failed"
    assert "not finite" in found.reason
    (found,) = measure(Subject(copy.deepcopy(trained(cnn)).bfloat16(), digits(), limit=10), parse_probes([name]))
    assert found.status == "ok", found.reason
    (found,) = measure(Subject(copy.deepcopy(trained(cnn)).double(), digits(), limit=1), parse_probes([name]))
    assert found.status == "ok", found.reason
