"""The losses of DiversePatch against the paper's formulas, written out patch by patch."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic._core.errors import TreatmentError
from vitclinic.treatments import contrastive_loss, cosine_loss, mixing_loss


def patches(images=2, count=5, width=4, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(images, count, width, generator=generator, dtype=torch.float64)


def cosine_written_out(h):
    total = 0.0
    for image in h:
        n = len(image)
        for i in range(n):
            for j in range(n):
                if i != j:
                    total += abs(image[i] @ image[j]) / (image[i].norm() * image[j].norm()) / (n * (n - 1))
    return total / len(h)


def contrastive_written_out(first, last):
    total = 0.0
    for a, b in zip(first, last, strict=True):
        n = len(a)
        for i in range(n):
            others = sum(b[j] for j in range(n) if j != i) / (n - 1)
            own, other = torch.exp(a[i] @ b[i]), torch.exp(a[i] @ others)
            total -= torch.log(own / (own + other)) / n
    return total / len(first)


def mixing_written_out(logits, targets):
    total = 0.0
    for image, wanted in zip(logits, targets, strict=True):
        for z, y in zip(image, wanted, strict=True):
            total -= sum(y[k] * (z[k] - torch.log(torch.exp(z).sum())) for k in range(len(z))) / len(image)
    return total / len(logits)


@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_each_loss_is_the_formula(images, count, width, seed):
    first, last = patches(images, count, width, seed), patches(images, count, width, seed + 1000)
    assert torch.allclose(cosine_loss(last), cosine_written_out(last), rtol=1e-10)
    assert torch.allclose(contrastive_loss(first, last), contrastive_written_out(first, last), rtol=1e-10)
    normal = contrastive_written_out(F.normalize(first, dim=-1), F.normalize(last, dim=-1))
    assert torch.allclose(contrastive_loss(first, last, normalise=True), normal, rtol=1e-10)
    targets = patches(images, count, width, seed + 7).softmax(-1)
    assert torch.allclose(mixing_loss(last, targets), mixing_written_out(last, targets), rtol=1e-10)


def test_gradients():
    first, last = patches(seed=1), patches(seed=2).requires_grad_()
    targets = patches(seed=3).softmax(-1)
    assert torch.autograd.gradcheck(cosine_loss, (last,))
    assert torch.autograd.gradcheck(lambda h: contrastive_loss(first, h), (last,))
    assert torch.autograd.gradcheck(lambda h: contrastive_loss(first, h, True), (last,))
    assert torch.autograd.gradcheck(lambda h: mixing_loss(h, targets), (last,))


def test_no_gradient_goes_into_the_first_layer():
    first, last = patches(seed=1).requires_grad_(), patches(seed=2).requires_grad_()
    contrastive_loss(first, last).backward()
    assert first.grad is None
    assert last.grad.abs().sum() > 0


def test_the_cosine_of_known_patches():
    same, crossed = torch.ones(1, 4, 3), torch.eye(4)[None]
    assert cosine_loss(same).item() == pytest.approx(1)
    assert cosine_loss(-same * torch.tensor([1.0, 2, -3, 4])[:, None]).item() == pytest.approx(1)
    assert cosine_loss(crossed).item() == pytest.approx(0, abs=1e-7)


def test_huge_vectors_do_not_overflow():
    """exp(1e12) is infinite; the loss is the margin itself, or nothing."""
    first = 1e6 * torch.eye(3)[None]
    last = (-first).requires_grad_()
    wrong = contrastive_loss(first, last)
    wrong.backward()
    assert contrastive_loss(first, first).item() == 0
    assert wrong.item() == pytest.approx(1e12)
    assert last.grad.isfinite().all()
    assert cosine_loss(1e15 * torch.ones(1, 3, 2)).item() == pytest.approx(1)


def test_zero_patches_make_no_nan():
    h = patches(1, 4, 3)
    h[0, 0] = 0
    h.requires_grad_()
    loss = cosine_loss(h) + contrastive_loss(h, h) + contrastive_loss(h, h, normalise=True)
    loss.backward()
    assert loss.isfinite()
    assert h.grad.isfinite().all()
    assert torch.allclose(cosine_loss(h), cosine_written_out(h[:, 1:]) * 6 / 12)  # orthogonal to the others
    dead = torch.zeros(2, 4, 3, requires_grad=True)
    (cosine_loss(dead) + contrastive_loss(dead, dead)).backward()
    assert cosine_loss(dead).item() == 0
    assert contrastive_loss(dead, dead).item() == pytest.approx(math.log(2))
    assert dead.grad.isfinite().all()


def test_half_precision_is_computed_in_float32_and_float64_stays():
    first, last = patches(seed=1, count=40, width=64), patches(seed=2, count=40, width=64)
    for loss in (lambda a, b: cosine_loss(b), contrastive_loss, lambda a, b: mixing_loss(b, a.softmax(-1))):
        assert loss(first, last).dtype == torch.float64
        half, single = loss(first.bfloat16(), last.bfloat16()), loss(first.float(), last.float())
        assert half.dtype == torch.float32
        assert torch.allclose(half, loss(first.bfloat16().float(), last.bfloat16().float()), rtol=1e-2)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(first.float(), last.float()), single)  # no rounding in the dot products


def test_one_patch_has_no_diversity():
    one = torch.ones(2, 1, 3)
    for loss in (lambda: cosine_loss(one), lambda: contrastive_loss(one, one)):
        with pytest.raises(TreatmentError, match="need at least two patches"):
            loss()
    assert mixing_loss(one, one / 3).item() == pytest.approx(math.log(3))


def test_targets_of_other_patches_are_refused():
    with pytest.raises(TreatmentError, match=r"\(2, 4, 3\).*\(2, 9, 3\): CutMix's cells must be"):
        mixing_loss(torch.zeros(2, 4, 3), torch.zeros(2, 9, 3))
