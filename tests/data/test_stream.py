import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic.data import Augment, TrainingStream, evaluation_batches, open_data
from vitclinic.data.randomness import SampleOrder


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_shows_every_image_once_or_some_of_them_repeatedly(count, repeats, epoch):
    places = np.arange(epoch * count, (epoch + 1) * count)
    images, showings = SampleOrder(count, 7, repeats)(places)
    if repeats == 1:
        assert sorted(images) == list(range(count))
    assert np.bincount(images).max() <= max(repeats, 2 * repeats if count % 2 else repeats)
    assert len({*zip(images.tolist(), showings.tolist(), strict=True)}) >= count - repeats + 1
    assert set(showings // repeats) == {epoch}


def test_repeated_copies_are_never_neighbours():
    images, _ = SampleOrder(600, 0, 3)(np.arange(600))
    assert (images[0::2] != images[1::2]).all()
    assert len(np.unique(images)) == 200


def test_epochs_differ_and_seeds_differ():
    order = SampleOrder(100, 0)
    first, second = order(np.arange(100))[0], order(np.arange(100, 200))[0]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, SampleOrder(100, 1)(np.arange(100))[0])


@pytest.mark.parametrize("level", ["none", "light", "deit"])
@pytest.mark.parametrize("cuts", [[0, 64], [0, 7, 8, 21, 64], list(range(65))])
def test_any_division_into_batches_gives_the_same_samples(digits, level, cuts):
    stream = TrainingStream(digits, Augment(level=level), seed=5)
    whole = stream[range(1400, 1464)]  # across the end of the first epoch
    parts = [stream[range(1400 + a, 1400 + b)] for a, b in pairwise(cuts)]
    for field in ("images", "targets", "indices", "keys"):
        assert torch.equal(torch.cat([getattr(p, field) for p in parts]), getattr(whole, field)), field


def test_workers_change_nothing(digits):
    stream = TrainingStream(digits, Augment(level="deit"), seed=5)
    requests = [range(i * 16, (i + 1) * 16) for i in range(6)]
    alone, helped = list(stream.batches(requests, 0)), list(stream.batches(requests, 2))
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)


def test_streams_can_be_sent_to_spawned_workers_without_copying_the_images(digits):
    stream = TrainingStream(digits, Augment(level="light"), seed=5)
    sent = pickle.dumps(stream)
    assert len(sent) < 100_000
    assert torch.equal(pickle.loads(sent)[range(8)].images, stream[range(8)].images)  # noqa: S301 (our own)


def test_a_batch_larger_than_the_set(digits):
    from vitclinic.data import DataConfig

    few = open_data(DataConfig(source="digits", limit=10))
    batch = TrainingStream(few, Augment(level="deit"), seed=0)[range(0, 64)]
    assert len(batch) == 64
    assert batch.indices.max() < 10


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_evaluation_reads_every_image_once_however_it_is_shared_out(digits, parts):
    batches = [b for part in range(parts) for b in evaluation_batches(digits, "test", 50, part, parts)]
    assert torch.cat([b.indices for b in batches]).tolist() == list(range(180))
    assert torch.equal(torch.cat([b.targets for b in batches]), torch.from_numpy(digits.test.labels))
