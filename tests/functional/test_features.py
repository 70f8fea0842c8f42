"""Representations: brute force over pairs and tuples, numpy's FFT, and what must not change a number."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitclinic import functional as F

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def hsic_by_tuples(x: Tensor, y: Tensor) -> float:
    """The U-statistic itself: the mean over all four different images (Song et al. 2012)."""
    k, m = (features @ features.T for features in (x, y))
    terms = [
        k[i, j] * m[i, j] + k[i, j] * m[q, r] - 2 * k[i, j] * m[i, q] for i, j, q, r in permutations(range(len(x)), 4)
    ]
    return float(torch.stack(terms).mean())


def test_hsic_is_the_mean_over_all_quadruples_of_images() -> None:
    x, y = normal(6, 3), normal(6, 2, seed=1)
    assert F.hsic(x, y).item() == pytest.approx(hsic_by_tuples(x, y), rel=1e-10)


def test_cka_is_the_ratio_of_brute_force_hsics() -> None:
    x, y = normal(6, 3), normal(6, 2, seed=1)
    expected = hsic_by_tuples(x, y) / (hsic_by_tuples(x, x) * hsic_by_tuples(y, y)) ** 0.5
    assert F.cka(x, y).item() == pytest.approx(expected, rel=1e-10)


@given(seed=seeds, scale=st.floats(0.01, 100), shift=st.floats(-5, 5))
@few
def test_cka_does_not_see_rotations_scales_and_shifts(seed: int, scale: float, shift: float) -> None:
    x, y = normal(9, 4, seed=seed), normal(9, 3, seed=seed + 1)
    rotation, _ = torch.linalg.qr(normal(4, 4, seed=seed + 2))
    assert F.cka(scale * x @ rotation + shift, y).item() == pytest.approx(F.cka(x, y).item(), abs=1e-9)
    assert F.cka(x @ rotation, x).item() == pytest.approx(1)
    assert F.cka(x, y).item() == pytest.approx(F.cka(y, x).item(), abs=1e-12)
    assert -1 <= F.cka(x, y).item() <= 1


def test_cka_takes_features_of_any_shape_and_keeps_the_dtype() -> None:
    maps = normal(8, 3, 4, 4)
    torch.testing.assert_close(F.cka(maps, maps.flatten(1) * 2), torch.tensor(1.0, dtype=torch.float64))
    assert F.cka(maps.float(), maps.float()).dtype == torch.float32
    assert F.cka(maps.half(), maps.half()).dtype == torch.float32
    assert F.cka(torch.ones(8, 3), maps).item() == 0


def test_minibatch_cka_averages_hsic_before_the_ratio() -> None:
    batches = [[normal(n, d, seed=10 * n + d) for d in (3, 5, 2)] for n in (6, 6)]
    mean = sum(torch.tensor([[F.hsic(a, b) for a in layers] for b in layers]) for layers in batches) / 2
    scale = mean.diagonal().sqrt()
    torch.testing.assert_close(F.minibatch_cka(batches), mean / scale[:, None] / scale, rtol=1e-8, atol=1e-10)


def test_minibatch_cka_of_one_batch_is_cka() -> None:
    x, y = normal(7, 3), normal(7, 4, seed=1)
    assert F.minibatch_cka([[x, y]])[0, 1].item() == pytest.approx(F.cka(x, y).item())
    with pytest.raises(ValueError, match="at least 4"):
        F.minibatch_cka([[x[:3], y[:3]]])


def similarity_by_pairs(tokens: Tensor, absolute: bool) -> float:
    cosines = [torch.cosine_similarity(a, b, dim=0) for a, b in permutations(tokens, 2)]
    return float(torch.stack([c.abs() if absolute else c for c in cosines]).mean())


@pytest.mark.parametrize("absolute", [False, True])
def test_patch_similarity_is_the_mean_over_pairs_of_tokens(absolute: bool) -> None:
    h = normal(2, 7, 5)
    expected = torch.tensor([similarity_by_pairs(tokens, absolute) for tokens in h], dtype=torch.float64)
    torch.testing.assert_close(F.patch_similarity(h, absolute), expected)


@given(seed=seeds, n=st.integers(2, 200))
@few
def test_patch_similarity_is_bounded_and_blind_to_lengths(seed: int, n: int) -> None:
    h = normal(2, n, 4, seed=seed)
    lengths = normal(2, n, 1, seed=seed + 1).abs() + 0.1
    signed, absolute = F.patch_similarity(h), F.patch_similarity(h, absolute=True)
    torch.testing.assert_close(F.patch_similarity(lengths * h), signed)
    torch.testing.assert_close(F.patch_similarity(lengths * h, absolute=True), absolute)
    assert (signed >= -1 / (n - 1) - 1e-9).all()  # n vectors cannot all point away from each other
    assert (absolute >= signed.abs() - 1e-9).all()
    assert (absolute <= 1 + 1e-9).all()


def test_tokens_that_are_zero_do_not_count() -> None:
    h = normal(1, 5, 3)
    padded = torch.cat((h, torch.zeros(1, 2, 3)), dim=1)
    torch.testing.assert_close(F.patch_similarity(padded, absolute=True), F.patch_similarity(h, absolute=True))
    assert F.patch_similarity(padded[:, 4:]).isnan().all()


def test_the_log_amplitude_is_that_of_numpy_s_fft_on_the_half_diagonal() -> None:
    maps = normal(2, 3, 8, 8)
    spectrum = np.abs(np.fft.fft2(maps.numpy()))
    expected = np.log(spectrum)[..., range(5), range(5)].mean(1)
    found = F.fourier_log_amplitude(maps)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(F.relative_log_amplitude(maps).numpy(), expected - expected[:, :1], rtol=1e-9)
    assert F.fourier_frequencies((8, 8)).tolist() == [0, 0.25, 0.5, 0.75, 1]


@given(seed=seeds, factor=st.floats(0.1, 50))
@few
def test_a_factor_shifts_the_log_amplitude_and_leaves_the_relative_one(seed: int, factor: float) -> None:
    maps = normal(1, 2, 6, 6, seed=seed) + 1
    shifted = F.fourier_log_amplitude(maps) + np.log(factor)
    torch.testing.assert_close(F.fourier_log_amplitude(factor * maps), shifted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(F.relative_log_amplitude(factor * maps), F.relative_log_amplitude(maps))


def test_the_feature_variance_is_torch_s_over_places() -> None:
    maps = normal(3, 4, 5, 6)
    torch.testing.assert_close(F.feature_variance(maps), maps.flatten(2).var(-1).mean(1))
    torch.testing.assert_close(F.feature_variance(3 * maps + 7), 9 * F.feature_variance(maps))
    with pytest.raises(ValueError, match="single position"):
        F.feature_variance(maps[..., :1, :1])


def test_active_neurons_are_counted_one_by_one() -> None:
    activation = normal(3, 7, 5).relu()
    expected = [sum(value > 0 for value in image.flatten().tolist()) / 35 for image in activation]
    assert F.active_neurons(activation).tolist() == pytest.approx(expected)
    assert F.sparsity(activation).tolist() == pytest.approx([1 - share for share in expected])


def test_norms_are_numpy_s() -> None:
    activation, parameters = normal(3, 7, 5), [normal(4, 2), normal(3)]
    expected = [np.linalg.norm(image.numpy().ravel()) for image in activation]
    assert F.activation_norm(activation).tolist() == pytest.approx(expected)
    flat = np.concatenate([p.numpy().ravel() for p in parameters])
    assert F.weight_norm(parameters) == pytest.approx(float(np.linalg.norm(flat)))


def test_block_structure_compares_pairs_that_are_as_far_apart() -> None:
    stages = [0, 0, 0, 1, 1]
    cka = normal(5, 5)
    cka = cka + cka.T
    differences = []
    for distance in range(1, 5):
        pairs = [(i, i + distance) for i in range(5 - distance)]
        within = [cka[i, j].item() for i, j in pairs if stages[i] == stages[j]]
        across = [cka[i, j].item() for i, j in pairs if stages[i] != stages[j]]
        if within and across:
            differences.append(np.mean(within) - np.mean(across))
    assert F.block_structure(cka, stages) == pytest.approx(float(np.mean(differences)))
    falling = torch.tensor([[0.9 ** abs(i - j) for j in range(5)] for i in range(5)])
    assert F.block_structure(falling, stages) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.cka(torch.rand(5, 2), torch.rand(6, 2)),
        lambda: F.hsic(torch.rand(3, 2), torch.rand(3, 2)),
        lambda: F.cka(torch.rand(5, 2).numpy(), torch.rand(5, 2)),
        lambda: F.patch_similarity(torch.rand(5, 2)),
        lambda: F.patch_similarity(torch.ones(1, 5, 2, dtype=torch.long)),
        lambda: F.fourier_log_amplitude(torch.rand(5, 2, 4)),
        lambda: F.feature_variance(torch.rand(5, 16, 2)),
        lambda: F.active_neurons(torch.rand(5)),
        lambda: F.block_structure(torch.rand(3, 3), [0, 1]),
    ],
)
def test_a_wrong_shape_is_told(call) -> None:
    with pytest.raises(ValueError, match=r"must|needs?"):
        call()
