"""Curvature: dense float64 Hessians and Jacobians by torch.autograd.functional, closed forms, numpy."""

import math
from collections.abc import Callable
from itertools import islice, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitclinic import functional as F

few = settings(max_examples=10, deadline=None)


class TinyAttention(nn.Module):
    """An MLP around torch's fused attention, whose fast kernels cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(2, 6), nn.Linear(2, 3)

    def forward(self, x_bnd: Tensor) -> Tensor:
        q, k, v = self.qkv(x_bnd)[:, None].chunk(3, dim=-1)
        return self.head(torch.tanh(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1)))


def network() -> TinyAttention:
    torch.manual_seed(0)
    return TinyAttention().double()


def data(count: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, 2, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=generator)


def loss_of(model: nn.Module) -> Callable[[], Tensor]:
    inputs, targets = data()
    return lambda: nn.functional.cross_entropy(model(inputs), targets)


def dense_hessian(model: nn.Module) -> Tensor:
    inputs, targets = data()
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), targets)

    return torch.autograd.functional.hessian(loss, nn.utils.parameters_to_vector(model.parameters()).detach())


def test_products_are_those_of_the_dense_hessian() -> None:
    model = network()
    vector = F.random_direction(model.parameters(), seed=3)
    found = F.hessian_vector_product(loss_of(model), model.parameters(), vector)
    expected = dense_hessian(model) @ nn.utils.parameters_to_vector(vector)
    torch.testing.assert_close(nn.utils.parameters_to_vector(found), expected)
    assert all(p.grad is None for p in model.parameters())


def test_eigenvalues_are_those_of_largest_magnitude_of_the_dense_hessian() -> None:
    model = network()
    values = torch.linalg.eigvalsh(dense_hessian(model))
    expected = values[values.abs().argsort(descending=True)][:5]
    found = F.hessian_eigenvalues(loss_of(model), model.parameters(), k=5, tolerance=1e-10)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert (found < 0).any()  # signs are kept


def test_a_block_s_eigenvalue_is_that_of_the_diagonal_block() -> None:
    model = network()
    count = sum(p.numel() for p in model.qkv.parameters())
    block = dense_hessian(model)[:count, :count]
    values = torch.linalg.eigvalsh(block)
    found = F.hessian_eigenvalues(loss_of(model), model.qkv.parameters(), k=1, tolerance=1e-10)
    torch.testing.assert_close(found[0], values[values.abs().argmax()], rtol=1e-7, atol=0)


def test_ragged_batches_give_the_hessian_of_the_mean_over_all_samples() -> None:
    model = network()
    inputs, targets = data()
    batches = [(inputs[:3], targets[:3]), (inputs[3:4], targets[3:4]), (inputs[4:], targets[4:])]
    given_batches = (model, nn.functional.cross_entropy, batches)
    whole, parts = (
        F.hessian_eigenvalues(loss, model.parameters(), k=3, tolerance=1e-10)
        for loss in (loss_of(model), given_batches)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-7, atol=1e-9)


def test_the_trace_s_draws_are_quadratic_forms_and_their_mean_converges() -> None:
    model = network()
    hessian = dense_hessian(model)
    found = F.hessian_trace(loss_of(model), model.parameters(), draws=225)
    assert abs(found.mean - hessian.trace().item()) < 4 * found.standard_error
    assert found.standard_error == pytest.approx(found.draws.std().item() / 15)
    off_diagonal = hessian - hessian.diagonal().diag()  # the variance of Hutchinson's estimate: 2 |H - diag H|^2
    assert found.draws.var().item() == pytest.approx(2 * off_diagonal.square().sum().item(), rel=0.4)


def test_the_trace_of_two_weights_takes_one_of_its_two_values() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    matrix = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)
    draws = F.hessian_trace(lambda: w @ matrix @ w / 2, [w], draws=8).draws
    values = {
        round(float(torch.tensor(s) @ matrix.float() @ torch.tensor(s)), 4) for s in product((-1.0, 1.0), repeat=2)
    }
    assert {round(draw, 4) for draw in draws.tolist()} == values


def test_the_density_has_the_moments_of_the_spectrum() -> None:
    model = network()
    values = torch.linalg.eigvalsh(dense_hessian(model))
    nodes, weights = F.hessian_density(loss_of(model), model.parameters(), steps=8, draws=50)
    assert nodes.shape == weights.shape == (400,)
    assert weights.sum().item() == pytest.approx(1)
    assert (nodes >= values.min() - 1e-9).all()
    assert (nodes <= values.max() + 1e-9).all()
    for power in (1, 2, 3):
        moments = (weights * nodes**power).view(50, 8).sum(1) * 50  # of each draw
        error = moments.std().item() / math.sqrt(50)
        assert abs(moments.mean().item() - (values**power).mean().item()) < 4 * error + 1e-12


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=20))
@few
def test_nep_and_ape_count_signs(values: list[float]) -> None:
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    positive = [value for value in values if value > 0]
    assert F.nep(eigenvalues) == pytest.approx(sum(value < 0 for value in values) / len(values))
    if positive:
        assert F.ape(eigenvalues) == pytest.approx(sum(positive) / len(positive))
    else:
        assert math.isnan(F.ape(eigenvalues))


def test_flatness_of_a_quadratic_is_known_and_the_weights_come_back() -> None:
    w = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = w.detach().clone()
    curvature = torch.linspace(0, 2, 50, dtype=torch.float64)

    def loss() -> Tensor:
        return (curvature * (w - before) ** 2).sum() / 2

    found = F.average_flatness(loss, [w], sigma=0.1, draws=400)
    assert abs(found.mean - 0.1**2 / 2 * curvature.sum().item()) < 4 * found.standard_error
    assert torch.equal(w, before)
    assert torch.equal(F.average_flatness(loss, [w], sigma=0.1, draws=400).draws, found.draws)


@pytest.mark.parametrize("over", ["filter", "dim0"])
def test_normalized_directions_have_the_norms_of_the_weights_part_by_part(over: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 3, 2, 2, generator=generator), torch.randn(5, 4, generator=generator), torch.ones(5)]
    direction = [torch.randn(w.shape, generator=generator) for w in weights]
    found = F.filter_normalize(direction, weights, over)
    for w, d, n in islice(zip(weights, direction, found, strict=True), 2):
        axis = 0 if over == "filter" else None
        parts = range(len(w)) if axis == 0 else np.ndindex(w.shape[1:])
        for part in parts:
            at = (part,) if axis == 0 else (slice(None), *part)
            torch.testing.assert_close(n[at], d[at] * w[at].norm() / d[at].norm())
    assert not found[2].any()
    moved = F.filter_normalize(direction, weights, over, vectors="normalize")[2]
    torch.testing.assert_close(moved, direction[2] * weights[2].norm() / direction[2].norm())


def test_the_landscape_is_the_loss_at_each_place() -> None:
    model = network()
    loss = loss_of(model)
    along = [F.filter_normalize(F.random_direction(model.parameters(), s), model.parameters()) for s in (0, 1)]
    before = [p.detach().clone() for p in model.parameters()]
    axis, losses = F.loss_landscape(loss, model.parameters(), along, points=5, span=0.5)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert axis.tolist() == [-0.5, -0.25, 0, 0.25, 0.5]
    for i, j in ((0, 0), (2, 2), (1, 4)):
        moved = network()
        with torch.no_grad():
            for p, d, e in zip(moved.parameters(), *along, strict=True):
                p += axis[i] * d + axis[j] * e
            assert losses[i, j].item() == pytest.approx(loss_of(moved)().item(), rel=1e-10)


def test_the_landscape_of_batches_is_that_of_all_samples() -> None:
    model = network()
    inputs, targets = data()
    along = [F.random_direction(model.parameters())]
    batches = (model, nn.functional.cross_entropy, [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])])
    _, whole = F.loss_landscape(loss_of(model), model.parameters(), along, points=3)
    _, parts = F.loss_landscape(batches, model.parameters(), along, points=3)
    torch.testing.assert_close(parts, whole)


def test_the_tangent_kernel_is_the_gram_matrix_of_gradients_taken_one_by_one() -> None:
    model = network()
    inputs, _ = data(5)
    rows = []
    for one in inputs:
        gradients = torch.autograd.grad(model(one[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    jacobian = torch.stack(rows)
    kernel = F.ntk(model, inputs)
    torch.testing.assert_close(kernel, jacobian @ jacobian.T)
    assert F.condition_number(kernel) == pytest.approx(np.linalg.cond(kernel.numpy()), rel=1e-6)


def test_a_condition_number_beyond_the_precision_is_a_lower_bound() -> None:
    kernel = torch.diag(torch.tensor([1.0, 1e-30], dtype=torch.float64))
    assert F.condition_number(kernel, torch.float32) == pytest.approx(1 / (10 * torch.finfo(torch.float32).eps) ** 2)


@given(seed=st.integers(0, 1000))
@few
def test_polar_coordinates_are_numpy_s_and_see_no_rotation(seed: int) -> None:
    course = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotation, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    found = F.polar_coordinates(course)
    displacement = (course[:-1] - course[-1]).numpy()
    lengths = np.linalg.norm(displacement, axis=1)
    cosine = displacement @ displacement[0] / (lengths * lengths[0])
    np.testing.assert_allclose(found.radius, lengths / lengths[0])
    np.testing.assert_allclose(found.angle, np.arccos(cosine.clip(-1, 1)), atol=1e-7)
    turned = F.polar_coordinates(3 * course @ rotation + 1)
    torch.testing.assert_close(turned.radius, found.radius)
    torch.testing.assert_close(turned.angle[1:], found.angle[1:])


def test_polar_coordinates_of_parameters_are_those_of_one_long_vector() -> None:
    course = [network().parameters() for _ in range(3)]
    states = [[p.detach() * (t + 1) + t for p in parameters] for t, parameters in enumerate(course)]
    flat = torch.stack([nn.utils.parameters_to_vector(state) for state in states])
    torch.testing.assert_close(F.polar_coordinates(states).radius, F.polar_coordinates(flat).radius)


W = torch.zeros(2, requires_grad=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.hessian_eigenvalues(lambda: W.sum(), []),
        lambda: F.hessian_eigenvalues(lambda: W.sum(), [torch.zeros(2)]),
        lambda: F.hessian_eigenvalues(lambda: W**2, [W]),
        lambda: F.hessian_eigenvalues((W**2).sum(), [W]),
        lambda: F.hessian_eigenvalues(lambda: (W**2).sum(), [W], k=0),
        lambda: F.hessian_vector_product(lambda: (W**2).sum(), [W], [torch.ones(3)]),
        lambda: F.hessian_density((nn.Identity(), nn.MSELoss(), []), [W]),
        lambda: F.nep(torch.zeros(0)),
        lambda: F.average_flatness(lambda: W.sum(), [W], sigma=0.0),
        lambda: F.loss_landscape(lambda: W.sum(), [W], [[torch.ones(2)]], points=2),
        lambda: F.filter_normalize([torch.ones(2)], [torch.ones(3)]),
        lambda: F.condition_number(torch.ones(2, 3)),
        lambda: F.polar_coordinates(torch.ones(1, 3)),
    ],
)
def test_a_wrong_argument_is_told(call) -> None:
    with pytest.raises(ValueError, match=r"must|There are no|two sets of weights|Give"):
        call()
