"""The unbiased HSIC and mini-batch CKA against their definitions, closed forms and invariances."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic._core.statistics import jackknife_half_width
from vitclinic.probes import mini_batch_cka
from vitclinic.probes.features.hsic import GROUPS, HSICSums, gram, hsic


def features(seed, n, widths, batches=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(n, width, generator=generator, dtype=torch.float64) for width in widths] for _ in range(batches)
    ]


def trace_formula(k, m):
    """Nguyen et al. 2021, Eq. 3, word for word."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    sums = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + sums - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def direct_cka(batches):
    """Everything stored, float64, one pair of layers and one mini-batch at a time; a list of lists of [n, d]."""
    layers = range(len(batches[0]))
    mean = np.zeros((len(layers), len(layers)))
    for batch in batches:
        grams = [np.asarray(x, dtype=np.float64) @ np.asarray(x, dtype=np.float64).T for x in batch]
        mean += len(batch[0]) * np.array([[trace_formula(grams[i], grams[j]) for j in layers] for i in layers])
    return np.array([[mean[i, j] / np.sqrt(mean[i, i] * mean[j, j]) for j in layers] for i in layers])


@pytest.mark.parametrize("n", [4, 5, 7])
def test_it_is_the_mean_over_quadruples_of_different_images(n):
    (layers,) = features(n, n, (3, 5))
    grams = np.stack([x @ x.T for x in map(torch.Tensor.numpy, layers)])
    found = hsic(grams)
    for one in range(2):
        for other in range(2):
            k, m = grams[one], grams[other]
            each = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(n), 4)]
            assert found[one, other] == pytest.approx(np.mean(each), rel=1e-9)
            assert found[one, other] == pytest.approx(trace_formula(k, m), rel=1e-9)


def test_the_hsic_is_averaged_over_mini_batches_before_the_ratio():
    batches = features(0, 6, (4, 3, 9), batches=5)
    found = mini_batch_cka(batches)
    np.testing.assert_allclose(found, direct_cka(batches), rtol=1e-9)
    ratios = np.mean([mini_batch_cka([batch]) for batch in batches], axis=0)
    assert np.abs(found - ratios).max() > 0.01


def test_a_mini_batch_counts_as_often_as_it_has_images():
    batches = [*features(0, 9, (4, 3), batches=2), *features(1, 5, (4, 3)), *features(2, 3, (4, 3))]
    np.testing.assert_allclose(mini_batch_cka(batches), direct_cka(batches[:3]), rtol=1e-9)
    with pytest.raises(ValueError, match="at least 4"):
        mini_batch_cka(batches[3:])
    with pytest.raises(ValueError, match="at least 4"):
        hsic(np.zeros((2, 3, 3)))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(4, 12),
    batches=st.integers(1, 3),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-100, 100),
)
def test_symmetric_one_on_the_diagonal_and_invariant_to_rotation_scale_and_translation(seed, n, batches, scale, shift):
    original = features(seed, n, (6, 3, 1), batches)
    found = mini_batch_cka(original)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found.diagonal(), 1, rtol=1e-12)
    assert np.abs(found).max() <= 1
    rotation, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    moved = [[x @ rotation * scale + shift, y, z] for x, y, z in original]
    np.testing.assert_allclose(mini_batch_cka(moved), found, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_layers_and_of_images_does_not_matter(seed):
    (layers,) = features(seed, 8, (6, 3, 2))
    order, images = np.random.default_rng(seed).permutation(3), torch.randperm(8)
    found = mini_batch_cka([[layers[at][images] for at in order]])
    np.testing.assert_allclose(found, mini_batch_cka([layers])[np.ix_(order, order)], atol=1e-9)


def off_diagonal_error(seed, batches):
    found = mini_batch_cka(features(seed, 8, (64,) * 6, batches))
    return np.sqrt(np.mean(found[~np.eye(6, dtype=bool)] ** 2))


def test_independent_features_have_nothing_in_common_and_the_error_falls_with_the_root_of_mini_batches():
    few, many = (np.mean([off_diagonal_error(seed, batches) for seed in range(4)]) for batches in (25, 400))
    assert many < 0.06  # the biased estimator says 0.9 here
    assert 2.5 < few / many < 6.5


def test_it_converges_to_the_covariances_of_gaussian_features():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 4)), rng.normal(size=(5, 7))
    square = {name: np.sum((one.T @ other) ** 2) for name, one, other in [("ab", a, b), ("aa", a, a), ("bb", b, b)]}
    expected = square["ab"] / np.sqrt(square["aa"] * square["bb"])
    batches = [[torch.from_numpy(z @ a), torch.from_numpy(z @ b)] for z in rng.normal(size=(4000, 8, 5))]
    assert mini_batch_cka(batches)[0, 1] == pytest.approx(expected, abs=0.01)


def test_a_large_mean_does_not_drown_small_differences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 50, generator=generator)
    y = x + torch.randn(16, 50, generator=generator)
    exact = direct_cka([[x, y]])
    shifted = [(x + 1000).float(), (y + 3000).float()]
    np.testing.assert_allclose(mini_batch_cka([shifted]), exact, atol=2e-4)
    half = [x.bfloat16(), y.bfloat16()]
    np.testing.assert_allclose(mini_batch_cka([half]), exact, atol=2e-2)


@pytest.mark.parametrize("n", [4, 7, 64, 333])
def test_constant_features_are_like_nothing(n):
    generator = torch.Generator().manual_seed(0)
    constant = (10 * torch.randn(1, 300, generator=generator)).repeat(n, 1)
    x = torch.randn(n, 300, generator=generator)
    assert not gram(constant).any()
    np.testing.assert_allclose(mini_batch_cka([[x, constant, 0 * x]]), np.diag([1, 0, 0]), atol=1e-12)


def test_sums_of_two_processes_add_up():
    batches = features(3, 6, (4, 3), batches=50)
    whole, parts = HSICSums(2), [HSICSums(2), HSICSums(2)]
    for at, batch in enumerate(batches):
        grams = torch.stack([gram(x) for x in batch])
        whole.add(grams)
        parts[at >= 20].add(grams)
    parts[0].merge(parts[1])
    np.testing.assert_allclose(parts[0].cka(), whole.cka(), rtol=1e-12)
    np.testing.assert_allclose(parts[0].without_each(), whole.without_each(), rtol=1e-12)
    assert (parts[0].batches, parts[0].images.tolist()) == (whole.batches, whole.images.tolist())
    assert whole.hsic.shape == (GROUPS, 2, 2)
    assert whole.without_each().shape == (GROUPS, 2, 2)


def test_the_jackknife_covers_the_truth():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    truth = np.sum((a.T @ b) ** 2) / np.sqrt(np.sum((a.T @ a) ** 2) * np.sum((b.T @ b) ** 2))
    covered = []
    for z in rng.normal(size=(150, 40, 8, 4)):
        sums = HSICSums(2)
        for images in torch.from_numpy(z):
            sums.add(torch.stack([gram(images @ torch.from_numpy(m)) for m in (a, b)]))
        half = jackknife_half_width(sums.without_each())[0, 1]
        covered.append(abs(sums.cka()[0, 1] - truth) <= half)
    assert 0.88 <= np.mean(covered) <= 0.995
