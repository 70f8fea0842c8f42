import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vitclinic.data.randomness import generator, sample_keys, torch_seed, uniforms


def keys(seed, count, epoch=0):
    return sample_keys(seed, np.full(count, epoch), np.arange(count))


def test_numbers_belong_to_the_sample_not_to_its_batch():
    together = uniforms(keys(3, 100), "crop", 4)
    alone = np.concatenate([uniforms(keys(3, 100)[i : i + 1], "crop", 4) for i in range(100)])
    assert np.array_equal(together, alone)


def test_more_numbers_do_not_change_the_first_ones():
    assert np.array_equal(uniforms(keys(0, 10), "x", 2), uniforms(keys(0, 10), "x", 7)[:, :2])


def test_uniform_in_every_bin_and_uncorrelated_between_neighbours():
    values = uniforms(keys(0, 20_000), "x", 5)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    expected = values.size / 50
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    correlations = np.corrcoef(values.T) - np.eye(5)
    assert np.abs(correlations).max() < 0.03
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.03


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_seed_epoch_index_and_purpose_all_matter(seed, epoch, index):
    def draw(s, e, i, purpose="x"):
        return float(uniforms(sample_keys(s, np.array([e]), np.array([i])), purpose, 1)[0, 0])

    value = draw(seed, epoch, index)
    assert 0 <= value < 1
    others = [draw(seed ^ 1, epoch, index), draw(seed, epoch + 1, index), draw(seed, epoch, index + 1)]
    assert value not in [*others, draw(seed, epoch, index, "y")]


def test_epoch_and_index_are_not_interchangeable():
    a = sample_keys(0, np.array([3]), np.array([5]))
    b = sample_keys(0, np.array([5]), np.array([3]))
    assert a != b


def test_named_generators_repeat():
    assert generator("order", 1, 2).permutation(10).tolist() == generator("order", 1, 2).permutation(10).tolist()
    assert generator("order", 1, 2).random() != generator("order", 1, 3).random()
    assert 0 <= torch_seed("weights", 0) < 2**63
