"""Confusions, class accuracies and the images that are shown, beside scikit-learn and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from tests.probes.subjects import subject
from vitclinic.data import Batch
from vitclinic.probes import Errors, LabelErrors, ProbeCollection, Slices, measure
from vitclinic.probes.behaviour.errors import PER_PAIR, choose_shown, class_scalars, count_pairs
from vitclinic.probes.behaviour.outcomes import KEPT, OutcomeSum


def outcomes_of(logits, labels, numbers=None):
    """Return the outcomes of images with these logits."""
    tally = OutcomeSum()
    count = len(labels)
    numbers = torch.arange(count) if numbers is None else numbers
    tally.add(
        Batch(torch.zeros(count, 1, 1, 1), torch.as_tensor(labels), numbers, numbers), torch.as_tensor(logits), "it"
    )
    return tally.collect()


def drawn(seed, images=60, classes=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(images, classes)), rng.integers(0, classes, images)


def test_the_matrix_and_its_balanced_accuracy_are_those_of_scikit_learn():
    logits, labels = drawn(0)
    found = outcomes_of(logits, labels)
    pairs, counts = count_pairs(found)
    dense = np.zeros((4, 4), int)
    dense[tuple(pairs.T)] = counts
    np.testing.assert_array_equal(dense, confusion_matrix(labels, logits.argmax(1)))
    scalars = class_scalars(np.bincount(labels), np.diag(dense))
    assert scalars["balanced_accuracy"].value == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))
    assert scalars["worst_class_accuracy"].value == (np.diag(dense) / dense.sum(1)).min()
    assert scalars["error_rate"].value == (logits.argmax(1) != labels).mean()


def test_the_interval_of_the_worst_class_covers_the_lowest_accuracy():
    rng = np.random.default_rng(1)
    true = np.array([0.9, 0.7, 0.7, 0.75, 0.95])
    held = 0
    for _ in range(400):
        images = np.full(5, 60)
        scalar = class_scalars(images, rng.binomial(images, true))["worst_class_accuracy"]
        held += scalar.low <= true.min() <= scalar.high
    assert held >= 0.95 * 400


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 30), images=st.integers(1, 200), most=st.integers(0, 40))
def test_shown_images_are_wrong_few_and_the_surest_of_their_pair_first(seed, classes, images, most):
    found = outcomes_of(*drawn(seed, images, classes))
    places = choose_shown(found, most)
    assert len(places) == len(set(places.tolist())) <= most
    assert found.is_wrong[places].all()
    pairs = {(a, b) for a, b in zip(found.labels, found.predicted, strict=True) if a != b}
    if most >= images:  # room for all: every pair has its surest image
        for label, predicted in pairs:
            mine = np.flatnonzero((found.labels == label) & (found.predicted == predicted))
            assert mine[found.confidence[mine].argmax()] in places
            assert np.isin(mine, places).sum() <= 2 * PER_PAIR


def test_most_frequent_pairs_come_first():
    labels = torch.tensor([0] * 5 + [1] * 2 + [2])
    logits = torch.nn.functional.one_hot(torch.tensor([1] * 5 + [2] * 2 + [0]), 3).double() * 3
    assert choose_shown(outcomes_of(logits, labels), 1).tolist() == [0]
    assert choose_shown(outcomes_of(logits, labels), 3).tolist() == [0, 5, 7]


def test_a_network_without_errors_shows_nothing():
    logits = torch.eye(3).repeat(4, 1)
    assert choose_shown(outcomes_of(logits, logits.argmax(1)), 10).tolist() == []


def test_outcomes_do_not_depend_on_batches_or_processes():
    logits, labels = (torch.as_tensor(each) for each in drawn(2, classes=14))
    whole = outcomes_of(logits, labels)
    first, second = OutcomeSum(), OutcomeSum()
    for tally, part in ((second, slice(0, 25)), (first, slice(25, 60))):  # the leading process may have the later part
        numbers = torch.arange(60)[part]
        batch = Batch(torch.zeros(len(numbers), 1, 1, 1), labels[part], numbers, numbers)
        tally.add(batch, logits[part], "it")
    first.merge(second)
    merged = first.collect()
    for name in ("numbers", "labels", "classes", "probabilities", "own"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole, name))
    assert whole.classes.shape == (60, KEPT)
    np.testing.assert_allclose(whole.own, logits.softmax(1).numpy()[np.arange(60), labels])


def test_thumbnails_are_the_images_of_the_errors():
    patient = subject("vit")
    (found,) = measure(patient, [Errors()])
    numbers = found.arrays["shown_numbers"]
    assert len(numbers) == round(found.scalars["error_rate"].value * 22)
    np.testing.assert_array_equal(found.arrays["shown_images"], patient.images.read(numbers))
    assert found.arrays["shown_names"][0] == f"image {numbers[0]}"
    (none,) = measure(patient, [Errors(shown=0)])
    assert len(none.arrays["shown_images"]) == 0
    assert none.scalars == found.scalars


def test_in_ones_own_loop_numbers_are_the_same_and_pictures_are_none():
    patient = subject("vit")
    network = patient.network.eval()
    (expected,) = measure(patient, [Errors()])
    with ProbeCollection(network, [Errors(), Slices(least=2), LabelErrors()]) as probes:
        for batch in patient.batches():
            network(batch.images)
            probes.update(batch.targets)
        found = probes.compute()
    assert found["errors"].scalars == expected.scalars
    assert len(found["errors"].arrays["shown_images"]) == 0
    np.testing.assert_array_equal(found["errors"].arrays["shown_numbers"], expected.arrays["shown_numbers"])
    assert found["slices"].status == "ok"
