"""Remedies: loops, torch's own losses and layers, gradients, and what must stay as it is."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitclinic import functional as F

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# SAM


@given(seed=seeds, rho=st.floats(0.001, 10), factor=st.floats(1e-6, 1e6))
@few
def test_sam_s_perturbation_has_length_rho_and_the_gradient_s_direction(seed: int, rho: float, factor: float) -> None:
    weights = [normal(3, 2, seed=seed), normal(4, seed=seed + 1)]
    gradients = [factor * normal(3, 2, seed=seed + 2), factor * normal(4, seed=seed + 3)]
    eps = torch.cat([part.flatten() for part in F.sam_perturbation(weights, rho, gradients=gradients)])
    slope = torch.cat([part.flatten() for part in gradients])
    assert eps.norm().item() == pytest.approx(rho)
    assert torch.cosine_similarity(eps, slope, dim=0).item() == pytest.approx(1)


@given(seed=seeds, eta=st.floats(0, 1))
@few
def test_asam_s_perturbation_is_the_best_step_of_its_own_norm(seed: int, eta: float) -> None:
    """T^-1 eps has length rho, and no other such step climbs higher to first order."""
    weights, gradients = normal(6, seed=seed), normal(6, seed=seed + 1)
    (eps,) = F.sam_perturbation([weights], 0.3, adaptive=True, eta=eta, gradients=[gradients])
    stretch = weights.abs() + eta
    assert (eps / stretch).norm().item() == pytest.approx(0.3)
    other = stretch * nn.functional.normalize(normal(6, seed=seed + 2), dim=0) * 0.3
    assert gradients @ other <= gradients @ eps + 1e-9


def test_sam_s_perturbation_climbs_from_the_gradients_of_a_backward_pass() -> None:
    layer = nn.Linear(3, 2).double()
    idle = nn.Parameter(torch.ones(2))
    layer(normal(5, 3)).square().sum().backward()
    before = [p.grad.clone() for p in layer.parameters()]
    eps = F.sam_perturbation([*layer.parameters(), idle], rho=0.2)
    norm = math.sqrt(sum(g.square().sum().item() for g in before))
    for part, gradient, p in zip(eps, before, layer.parameters(), strict=False):
        torch.testing.assert_close(part, 0.2 * gradient / norm)
        assert torch.equal(p.grad, gradient)  # nothing is used up
    assert not eps[-1].any()


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gradient_that_says_nothing_moves_nothing(value: float, adaptive: bool) -> None:
    (eps,) = F.sam_perturbation([torch.ones(3)], 0.1, adaptive, gradients=[torch.full((3,), value)])
    assert torch.equal(eps, torch.zeros(3))


@given(seed=seeds)
@few
def test_looksam_s_direction_is_what_gram_and_schmidt_leave(seed: int) -> None:
    first, second = normal(5, seed=seed), normal(5, seed=seed + 1)
    (v,) = F.looksam_direction([first], [second])
    assert v.norm().item() == pytest.approx(1)
    assert (v @ first).item() == pytest.approx(0, abs=1e-9)
    unit = first / first.norm()
    torch.testing.assert_close((second @ unit) * unit + (second @ v) * v, second)  # nothing of it is lost
    (used,) = F.looksam_gradient([first], [v], alpha=0.3)
    torch.testing.assert_close(used, first + 0.3 * first.norm() * v)


def test_looksam_of_parallel_gradients_has_no_direction() -> None:
    (v,) = F.looksam_direction([torch.ones(4)], [3 * torch.ones(4)])
    assert not v.any()
    with pytest.raises(ValueError, match="not finite"):
        F.looksam_direction([torch.ones(2)], [torch.tensor([math.inf, 0.0])])


# Losses


def test_the_losses_are_written_out() -> None:
    logits, labels = normal(4, 3), torch.tensor([0, 2, 1, 1])
    shares = normal(4, 3, seed=1).softmax(1)
    one_hot = torch.eye(3, dtype=torch.float64)[labels]
    for targets, y in ((labels, one_hot), (shares, shares)):
        log_p = logits - logits.exp().sum(1, keepdim=True).log()
        torch.testing.assert_close(F.softmax_loss(logits, targets), -(y * log_p).sum(1).mean())
        p = 1 / (1 + (-logits).exp())
        binary = -(y * p.log() + (1 - y) * (1 - p).log())
        torch.testing.assert_close(F.sigmoid_loss(logits, targets), binary.sum(1).mean())
    assert F.softmax_loss(logits.half(), labels).dtype == torch.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_are_torch_s_label_smoothing(smoothing: float) -> None:
    logits, labels = normal(6, 4).float(), torch.tensor([0, 1, 2, 3, 1, 0])
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(F.softmax_loss(logits, F.soft_targets(labels, 4, smoothing)), expected)


# Layers


@given(seed=seeds)
@few
def test_batch_norm_with_relu_is_a_scaled_relu(seed: int) -> None:
    norm = nn.BatchNorm2d(3).double().eval()
    norm.weight.data, norm.bias.data = normal(3, seed=seed).abs() + 0.1, normal(3, seed=seed + 1)
    x = normal(2, 3, 4, 4, seed=seed + 2)
    shift, scale = (norm.bias / norm.weight)[:, None, None], norm.weight[:, None, None]
    expected = F.scaled_relu(x / math.sqrt(1 + norm.eps), shift, scale)
    torch.testing.assert_close(norm(x).relu(), expected)


def test_scaled_relu_is_relu_without_scales_and_homogeneous_in_both() -> None:
    x = normal(50)
    assert torch.equal(F.scaled_relu(x), x.relu())
    torch.testing.assert_close(F.scaled_relu(3 * x, 3 * 0.2, 0.5), 3 * F.scaled_relu(x, 0.2, 0.5))


def test_context_broadcasting_token_by_token() -> None:
    x, scale = normal(2, 5, 3), normal(3, seed=1)
    for image in range(2):
        mean = sum(x[image, j] for j in range(5)) / 5
        for token in range(5):
            torch.testing.assert_close(F.context_broadcasting(x)[image, token], (x[image, token] + mean) / 2)
            expected = x[image, token] + scale * mean
            torch.testing.assert_close(F.context_broadcasting(x, scale)[image, token], expected)


@given(seed=seeds)
@few
def test_context_broadcasting_keeps_the_mean_and_halves_the_deviations(seed: int) -> None:
    x = normal(2, 6, 3, seed=seed)
    found = F.context_broadcasting(x)
    torch.testing.assert_close(found.mean(1), x.mean(1))
    torch.testing.assert_close(found - found.mean(1, keepdim=True), (x - x.mean(1, keepdim=True)) / 2)
    grid = x.unflatten(1, (2, 3))
    torch.testing.assert_close(F.context_broadcasting(grid).flatten(1, 2), found)
    assert F.context_broadcasting(x.half(), torch.ones(3)).dtype == torch.float16


def test_context_broadcasting_has_the_gradient_of_its_formula() -> None:
    x, scale = normal(1, 4, 2).requires_grad_(), normal(2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(F.context_broadcasting, (x, scale))
    assert torch.autograd.gradcheck(F.context_broadcasting, (x,))


def test_squeeze_excitation_gates_channels() -> None:
    x, squeeze, excite = normal(2, 5, 4), normal(2, 4, seed=1), normal(4, 2, seed=2)
    hidden = (x.mean(1) @ squeeze.T).clamp(min=0)
    gate = 1 / (1 + (-(hidden @ excite.T)).exp())
    torch.testing.assert_close(F.squeeze_excitation(x, squeeze, excite), x * gate[:, None])


def test_smoothing_is_a_mean_of_four_neighbours() -> None:
    maps = normal(2, 3, 5, 4)
    padded = nn.functional.pad(maps, (0, 1, 0, 1), mode="replicate")
    torch.testing.assert_close(F.spatial_smoothing(maps), nn.functional.avg_pool2d(padded, 2, stride=1))


# Patches


def test_the_cosine_loss_is_the_mean_over_pairs_and_agrees_with_the_measurement() -> None:
    h = normal(3, 6, 4).requires_grad_()
    pairs = [torch.cosine_similarity(h[:, i], h[:, j]).abs() for i, j in permutations(range(6), 2)]
    expected = torch.stack(pairs).mean()
    found = F.patch_cosine_loss(h)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, F.patch_similarity(h, absolute=True).mean())
    gradients = [torch.autograd.grad(loss, h, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_contrastive_loss_is_the_paper_s_quotient(normalize: bool) -> None:
    first, last = normal(2, 5, 3).requires_grad_(), normal(2, 5, 3, seed=1).requires_grad_()
    one, other = (nn.functional.normalize(x, dim=-1) if normalize else x for x in (first, last))
    terms = []
    for b in range(2):
        for i in range(5):
            own = (one[b, i] @ other[b, i]).exp()
            rest = (one[b, i] @ (sum(other[b, j] for j in range(5) if j != i) / 4)).exp()
            terms.append(-(own / (own + rest)).log())
    found = F.patch_contrastive_loss(first, last, normalize)
    torch.testing.assert_close(found, torch.stack(terms).mean())
    found.backward()
    assert first.grad is None
    assert last.grad is not None


def test_the_contrastive_loss_does_not_overflow() -> None:
    assert F.patch_contrastive_loss(1e3 * torch.eye(2)[None], -1e3 * torch.eye(2)[None]).isfinite()


def test_the_mixing_loss_is_the_mean_cross_entropy_of_patches() -> None:
    logits, targets = normal(2, 4, 3), normal(2, 4, 3, seed=1).softmax(-1)
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(F.patch_mixing_loss(logits, targets), -(targets * log_p).sum(-1).mean())


@given(seed=seeds)
@few
def test_cutmix_on_patch_borders_patch_by_patch(seed: int) -> None:
    images, targets = normal(3, 2, 6, 4, seed=seed), normal(3, 5, seed=seed + 1).softmax(1)
    partner = torch.tensor([2, 0, 1])
    cut = normal(3, 3, 2, seed=seed + 2) > 0
    mixed, soft, patches = F.patch_cutmix(images, targets, partner, cut)
    for b in range(3):
        for row in range(3):
            for column in range(2):
                source = partner[b] if cut[b, row, column] else b
                place = (slice(None), slice(2 * row, 2 * row + 2), slice(2 * column, 2 * column + 2))
                assert torch.equal(mixed[b][place], images[source][place])
                assert torch.equal(patches[b, 2 * row + column], targets[source])
    torch.testing.assert_close(soft, patches.mean(1))  # lambda is the share of patches


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.sam_perturbation([torch.ones(2)], -1.0, gradients=[torch.ones(2)]),
        lambda: F.sam_perturbation([torch.ones(2)], 0.1, gradients=[torch.ones(3)]),
        lambda: F.looksam_direction([torch.ones(2)], [torch.ones(3)]),
        lambda: F.looksam_gradient([torch.ones(2)], [torch.ones(2), torch.ones(1)]),
        lambda: F.softmax_loss(torch.rand(3), torch.tensor([0])),
        lambda: F.context_broadcasting(torch.rand(3, 2)),
        lambda: F.context_broadcasting(torch.rand(1, 3, 2), torch.ones(3)),
        lambda: F.squeeze_excitation(torch.rand(1, 3, 2), torch.ones(1, 2), torch.ones(1, 2)),
        lambda: F.spatial_smoothing(torch.rand(3, 2, 2)),
        lambda: F.patch_cosine_loss(torch.rand(3, 2)),
        lambda: F.patch_contrastive_loss(torch.rand(1, 3, 2), torch.rand(1, 4, 2)),
        lambda: F.patch_mixing_loss(torch.rand(1, 3, 2), torch.rand(1, 2, 2)),
        lambda: F.patch_cutmix(torch.rand(1, 3, 4, 4), torch.rand(1, 2), torch.tensor([0]), torch.ones(2, 2, 2)),
        lambda: F.soft_targets(torch.rand(3), 2),
    ],
)
def test_a_wrong_shape_is_told(call) -> None:
    with pytest.raises(ValueError, match="must"):
        call()


def test_one_patch_has_no_diversity_and_images_must_divide() -> None:
    with pytest.raises(ValueError, match="at least two patches"):
        F.patch_cosine_loss(torch.rand(1, 1, 2))
    with pytest.raises(ValueError, match="do not divide"):
        F.patch_cutmix(torch.rand(1, 3, 5, 4), torch.rand(1, 2), torch.tensor([0]), torch.ones(1, 2, 2))
