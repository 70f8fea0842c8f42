"""Answers: torchmetrics, and counting by hand; lesions against networks with the branch taken out by hand."""

import math

import pytest
import timm
import torch
import torchmetrics.functional.classification as metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitclinic import functional as F

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def answers(count: int = 200, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_accuracy_is_torchmetrics_(k: int) -> None:
    logits, targets = answers()
    expected = metrics.multiclass_accuracy(logits, targets, num_classes=7, top_k=k, average="micro")
    assert F.accuracy(logits, targets, k) == pytest.approx(expected.item(), abs=1e-6)


def test_of_equal_logits_the_first_class_wins_as_in_argmax() -> None:
    logits = torch.zeros(4, 3)
    targets = torch.tensor([0, 1, 2, 0])
    assert F.accuracy(logits, targets) == (logits.argmax(1) == targets).double().mean().item()


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_torchmetrics_(bins: int) -> None:
    logits, targets = answers()
    expected = metrics.multiclass_calibration_error(logits.softmax(1), targets, num_classes=7, n_bins=bins)
    assert F.expected_calibration_error(logits, targets, bins) == pytest.approx(expected.item(), rel=1e-5)


@given(seed=seeds, bins=st.integers(1, 30))
@few
def test_the_calibration_error_is_the_weighted_gap_of_the_diagram(seed: int, bins: int) -> None:
    logits, targets = answers(30, seed=seed)
    diagram = F.reliability_diagram(logits, targets, bins)
    gaps = (diagram.accuracy - diagram.confidence).abs().nan_to_num()
    error = F.expected_calibration_error(logits, targets, bins)
    assert error == pytest.approx((diagram.images * gaps).sum().item() / 30)
    assert 0 <= error <= 1
    assert diagram.images.sum().item() == 30


def test_images_with_several_right_classes() -> None:
    logits, _ = answers(50)
    valid = torch.rand(50, 7, generator=torch.Generator().manual_seed(1)) < 0.3
    counted = [image for image in range(50) if valid[image].any()]
    hits = [bool(valid[image, logits[image].argmax()]) for image in counted]
    assert F.accuracy_on_valid(logits, valid) == pytest.approx(sum(hits) / len(hits))
    with pytest.raises(ValueError, match="No image"):
        F.accuracy_on_valid(logits, torch.zeros_like(valid))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
@few
def test_the_drop_is_the_difference_of_accuracies(pairs: list[tuple[bool, bool]]) -> None:
    before, after = (torch.tensor(side) for side in zip(*pairs, strict=True))
    assert F.accuracy_drop(before, after) == pytest.approx(before.double().mean().item() - after.double().mean().item())


def test_a_lesion_of_a_branch_leaves_the_residual() -> None:
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2).eval()
    images = torch.rand(2, 3, 16, 16)
    whole = vit(images)
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    x = x + vit.blocks[0].mlp(vit.blocks[0].norm2(x))  # without its attention
    expected = vit.forward_head(vit.norm(vit.blocks[1](x)))
    with F.lesion(vit.blocks[0].attn):
        torch.testing.assert_close(vit(images), expected)
    torch.testing.assert_close(vit(images), whole)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_lesion_of_a_conv_gives_its_input_subsampled_by_its_stride(stride: int) -> None:
    conv = nn.Conv2d(3, 3, 3, stride, padding=1)
    images = torch.rand(1, 3, 8, 8)
    with F.lesion(conv):
        assert torch.equal(conv(images), images[..., ::stride, ::stride])


def test_a_lesion_ends_with_an_error_too() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="stop"), F.lesion(layer):
        raise RuntimeError("stop")
    assert layer(torch.ones(1, 2)).any()


def test_the_missing_rate_counts_predictions_of_a_third_class() -> None:
    generator = torch.Generator().manual_seed(0)
    found, one, other = torch.randint(4, (3, 100), generator=generator)
    misses = [p not in (i, j) for p, i, j in zip(found.tolist(), one.tolist(), other.tolist(), strict=True)]
    assert F.missing_rate(found, one, other) == pytest.approx(sum(misses) / 100)
    images = torch.rand(2, 5, 3, 4, 4, generator=generator)
    torch.testing.assert_close(F.midpoint(*images), images.mean(0))


def test_the_shape_bias_leaves_third_classes_out() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(5, (200,), generator=generator)
    textures = (shapes + torch.randint(1, 5, (200,), generator=generator)) % 5
    found = torch.randint(5, (200,), generator=generator)
    by_shape = sum(p == s for p, s in zip(found.tolist(), shapes.tolist(), strict=True))
    by_texture = sum(p == t for p, t in zip(found.tolist(), textures.tolist(), strict=True))
    assert F.shape_bias(found, shapes, textures) == pytest.approx(by_shape / (by_shape + by_texture))
    assert math.isnan(F.shape_bias(torch.tensor([2]), torch.tensor([0]), torch.tensor([1])))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.accuracy(torch.rand(3), torch.tensor([0, 1, 2])),
        lambda: F.accuracy(torch.rand(3, 2), torch.tensor([0, 1])),
        lambda: F.accuracy(torch.rand(3, 2), torch.rand(3)),
        lambda: F.expected_calibration_error(torch.rand(3, 2), torch.tensor([0, 1, 1]), bins=0),
        lambda: F.accuracy_on_valid(torch.rand(3, 2), torch.ones(3, 3, dtype=torch.bool)),
        lambda: F.accuracy_drop(torch.ones(3), torch.ones(4)),
        lambda: F.missing_rate(torch.zeros(3), torch.zeros(3), torch.zeros(2)),
        lambda: F.shape_bias(torch.zeros(3), torch.zeros(2), torch.zeros(3)),
        lambda: F.midpoint(torch.rand(1, 3, 2, 2), torch.rand(2, 3, 2, 2)),
    ],
)
def test_a_wrong_shape_is_told(call) -> None:
    with pytest.raises(ValueError, match=r"must|at least"):
        call()


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_the_temperature_is_the_minimum_that_scipy_finds(scale: float) -> None:
    from scipy.optimize import minimize_scalar

    torch.manual_seed(0)
    logits = 2 * torch.randn(300, 4, dtype=torch.float64)
    targets = torch.distributions.Categorical(logits=logits).sample()
    n, k = logits.shape
    smooth = torch.full((n, k), 1 / (n + 2) / (k - 1), dtype=torch.float64)
    smooth[torch.arange(n), targets] = (n + 1) / (n + 2)
    found = F.fit_temperature(scale * logits, targets)
    loss = lambda t: nn.functional.cross_entropy(scale * logits / math.exp(t), smooth).item()  # noqa: E731
    assert found == pytest.approx(math.exp(minimize_scalar(loss, (-2, 3), tol=1e-10).x), rel=1e-5)
    assert found == pytest.approx(scale, rel=0.15)  # what the logits were multiplied by


def test_a_few_images_that_are_all_right_do_not_make_certain() -> None:
    logits = torch.eye(3) * 2
    temperature = F.fit_temperature(logits, torch.arange(3))
    assert (logits / temperature).softmax(1).amax().item() == pytest.approx(4 / 5, rel=1e-6)


@pytest.mark.parametrize(("classes", "count"), [(1000, 1000), (100, 500), (10, 100)])
def test_logits_that_are_calibrated_stay_so_however_many_classes_there_are(classes: int, count: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2 * count, classes, dtype=torch.float64)
    targets = torch.distributions.Categorical(logits=logits).sample()
    temperature = F.fit_temperature(logits[:count], targets[:count])
    assert temperature == pytest.approx(1, abs=0.15)
    before, after = (F.expected_calibration_error(logits[count:] / t, targets[count:]) for t in (1, temperature))
    assert after < before + 0.02
