"""Attention: scipy's entropy, loops over tokens, dense Jacobians, torch's own attention."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitclinic import functional as F

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def weights(batch: int, heads: int, tokens: int, seed: int = 0) -> Tensor:
    logits = torch.randn(
        batch, heads, tokens, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (3 * logits).softmax(-1)


def test_the_entropy_is_scipy_s() -> None:
    attention = weights(2, 3, 5)
    np.testing.assert_allclose(F.attention_entropy(attention), scipy.stats.entropy(attention.numpy(), axis=-1))
    percentile = np.percentile(scipy.stats.entropy(attention.numpy(), axis=-1).reshape(2, -1), 85, axis=1)
    np.testing.assert_allclose(F.upper_attention_entropy(attention), percentile)


@given(seed=seeds, tokens=st.integers(1, 30))
@few
def test_the_entropy_is_between_zero_and_that_of_uniform_attention(seed: int, tokens: int) -> None:
    entropy = F.attention_entropy(weights(1, 2, tokens, seed))
    assert (entropy >= 0).all()
    assert (entropy <= math.log(tokens) + 1e-9).all()
    uniform = torch.full((1, 1, 1, tokens), 1 / tokens, dtype=torch.float64)
    assert F.attention_entropy(uniform).item() == pytest.approx(math.log(tokens))
    assert F.attention_entropy(torch.eye(tokens)[None, None]).max() == 0


def test_the_entropy_has_the_gradient_of_its_formula() -> None:
    attention = weights(1, 1, 4).requires_grad_()
    F.attention_entropy(attention).sum().backward()
    torch.testing.assert_close(attention.grad, -(attention.detach().log() + 1))


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_distance_is_the_mean_over_pairs_of_patches(prefix: int) -> None:
    grid = (2, 3)
    attention = weights(2, 2, prefix + 6)
    places = [(row / 1, column / 2) for row in range(2) for column in range(3)]
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for i, p in enumerate(places):
        for j, q in enumerate(places):
            apart = abs(p[0] - q[0]) + abs(p[1] - q[1])
            expected += attention[:, :, prefix + i, prefix + j] * apart
    torch.testing.assert_close(F.attention_distance(attention, grid, prefix), expected / 30)
    torch.testing.assert_close(F.attention_distance(attention, grid, prefix, per_query=True), expected / 6)


def test_attention_to_itself_reaches_nowhere() -> None:
    assert F.attention_distance(torch.eye(9)[None, None], (3, 3)).item() == 0


def test_the_map_is_the_class_token_s_attention_on_the_grid() -> None:
    attention = weights(2, 3, 7)
    found = F.attention_map(attention, (2, 3))
    for image in range(2):
        for place in range(6):
            expected = np.mean([attention[image, head, 0, 1 + place] for head in range(3)])
            assert found[image, place // 3, place % 3].item() == pytest.approx(expected)
    without_class = weights(2, 3, 6)
    torch.testing.assert_close(F.attention_map(without_class, (3, 2), prefix=0).flatten(1), without_class.mean((1, 2)))


@given(seed=seeds, keys=st.integers(2, 12), scale=st.floats(0.05, 3))
@few
def test_the_jacobian_s_nuclear_norm_is_that_of_the_dense_jacobian(seed: int, keys: int, scale: float) -> None:
    scores = torch.randn(keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda s: (scale * s).softmax(0), scores)
    row = (scale * scores).softmax(0)
    found = F.softmax_jacobian_norm(row, scale)
    torch.testing.assert_close(found, torch.linalg.matrix_norm(jacobian, ord="nuc"), rtol=1e-7, atol=1e-10)
    assert found <= scale * (1 - 1 / keys) + 1e-9  # that of uniform attention
    found = F.softmax_jacobian_norm(row, scale, norm="frobenius")
    torch.testing.assert_close(found, torch.linalg.matrix_norm(jacobian), rtol=1e-7, atol=1e-10)


def test_the_ratio_of_scales_is_of_numpy_s_quantiles() -> None:
    scale = torch.linspace(-1, 3, 50)
    low, high = np.quantile(scale.double().abs().numpy(), [0.1, 0.9])  # of magnitudes, as the paper's text says
    assert F.cb_scale_ratio(scale) == pytest.approx(low / high)
    assert math.isnan(F.cb_scale_ratio(torch.zeros(5)))


def qkv(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 2, 3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).unbind()


def test_uniform_attention_is_attention_to_equal_keys() -> None:
    _, _, value = qkv()
    same = torch.zeros_like(value)
    expected = torch.nn.functional.scaled_dot_product_attention(same, same, value)[:, 0]
    torch.testing.assert_close(F.uniform_attention(value[:, 0]), expected)


def test_attention_without_softmax_is_the_product_of_three_matrices() -> None:
    query, key, value = qkv()
    expected = torch.einsum("bhqd,bhkd,bhke->bhqe", query, key, value) / 2
    torch.testing.assert_close(F.softmax_free_attention(query, key, value), expected)


def test_talking_heads_without_mixes_is_torch_s_attention() -> None:
    query, key, value = qkv()
    mask = F.neighborhood_mask((1, 5), 3)
    found = F.talking_heads_attention(query, key, torch.eye(3).double(), torch.eye(3).double(), mask=mask) @ value
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(found, expected)


def test_talking_heads_mixes_logits_and_weights_head_by_head() -> None:
    query, key, _ = qkv()
    before, behind = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = [query[:, h] @ key[:, h].mT / 2 for h in range(3)]
    mixed = [sum(before[h, i] * logits[i] for i in range(3)).softmax(-1) for h in range(3)]
    expected = torch.stack([sum(behind[h, i] * mixed[i] for i in range(3)) for h in range(3)], dim=1)
    torch.testing.assert_close(F.talking_heads_attention(query, key, before, behind), expected)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_neighborhood_is_found_by_looking_at_every_pair(kernel: int, prefix: int) -> None:
    mask = F.neighborhood_mask((3, 4), kernel, prefix)
    places = [None] * prefix + [(row, column) for row in range(3) for column in range(4)]
    for i, p in enumerate(places):
        for j, q in enumerate(places):
            far = p is not None and q is not None and max(abs(p[0] - q[0]), abs(p[1] - q[1])) > (kernel - 1) / 2
            assert mask[i, j].item() is not far


def test_a_window_of_twice_the_grid_sees_everything() -> None:
    assert F.neighborhood_mask((4, 4), 7).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.attention_entropy(torch.rand(2, 5, 5)),
        lambda: F.attention_distance(torch.rand(1, 1, 5, 5), (2, 2)),
        lambda: F.attention_distance(torch.rand(1, 1, 1, 1), (1, 1)),
        lambda: F.attention_map(torch.rand(1, 1, 4, 4), (2, 2)),
        lambda: F.uniform_attention(torch.rand(4, 4)),
        lambda: F.softmax_free_attention(torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4)),
        lambda: F.talking_heads_attention(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), torch.eye(3)),
        lambda: F.neighborhood_mask((2, 2), 2),
        lambda: F.cb_scale_ratio(torch.rand(2, 2)),
    ],
)
def test_a_wrong_shape_is_told(call) -> None:
    with pytest.raises(ValueError, match=r"must|give"):
        call()
