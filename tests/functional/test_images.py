"""Changed images: attacks written out with autograd and beside foolbox, energies by torch.fft, loops over pixels."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitclinic import functional as F
from vitclinic.data.corruptions import NINETEEN, Corruption

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


def images(count: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 8, 8, generator=generator), torch.randint(5, (count,), generator=generator)


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), x)[0]


def test_fgsm_is_one_signed_step() -> None:
    model, (x, y) = network(), images()
    expected = (x + 0.05 * gradient(model, x, y).sign()).clamp(0, 1)
    torch.testing.assert_close(F.fgsm(model, x, y, epsilon=0.05), expected)


def test_pgd_repeats_clipped_steps() -> None:
    model, (x, y) = network(), images()
    expected = x
    for _ in range(4):
        moved = expected + 0.02 * gradient(model, expected, y).sign()
        expected = torch.min(torch.max(moved, x - 0.05), x + 0.05).clamp(0, 1)
    torch.testing.assert_close(F.pgd(model, x, y, epsilon=0.05, step=0.02, steps=4), expected)


def test_pgd_is_foolbox_s() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foolbox = pytest.importorskip("foolbox")
        model, (x, y) = network(), images()
        attack = foolbox.attacks.LinfPGD(abs_stepsize=0.02, steps=4, random_start=False)
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
        criterion = foolbox.criteria.Misclassification(y)
        expected, _, _ = attack(wrapped, x, criterion, epsilons=[0.05])
    torch.testing.assert_close(F.pgd(model, x, y, epsilon=0.05, step=0.02, steps=4), expected[0], rtol=1e-5, atol=1e-6)


@given(seed=seeds, norm=st.sampled_from(["linf", "l2"]), epsilon=st.floats(0, 2), step=st.floats(0.01, 3))
@few
def test_a_step_stays_in_the_ball_and_in_the_unit_interval(seed: int, norm: str, epsilon: float, step: float) -> None:
    x, _ = images(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    here, slope = x + 0.3 * torch.randn(x.shape, generator=generator), torch.randn(x.shape, generator=generator)
    moved = F.attack_step(x, here, slope, epsilon, step, norm)
    assert ((moved >= 0) & (moved <= 1)).all()
    change = (moved - x).flatten(1)
    size = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
    assert (size <= epsilon + 1e-5).all()


def test_a_small_l2_step_is_along_the_gradient() -> None:
    x, _ = images()
    x = 0.5 * x + 0.25
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = x + 0.1 * slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
    torch.testing.assert_close(F.attack_step(x, x, slope, epsilon=1.0, step=0.1, norm="l2"), expected)


def test_rings_are_the_distances_of_the_frequencies() -> None:
    rings = F.frequency_rings((6, 5), width=0.25)
    for i in range(6):
        for j in range(5):
            row, column = (i if i <= 2 else i - 6) / 6, (j if j <= 2 else j - 5) / 5
            assert rings[i, j].item() == math.floor(2 * math.hypot(row, column) / 0.25 + 1e-9)


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_band_noise_has_its_energy_in_the_band_and_a_unit_root_mean_square(size: tuple[int, int]) -> None:
    noise = torch.randn(3, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rings = F.frequency_rings(size, width=0.3)
    for ring in rings.unique():
        mask = rings == ring
        found = F.band_noise(noise, mask)
        torch.testing.assert_close(found.square().mean((1, 2, 3)).sqrt(), torch.ones(3, dtype=torch.float64))
        assert torch.fft.fft2(found)[..., ~mask].abs().max() < 1e-9
        kept = torch.fft.ifft2(torch.fft.fft2(noise) * mask).real
        cosine = torch.cosine_similarity(found.flatten(1), kept.flatten(1))
        torch.testing.assert_close(cosine, torch.ones(3, dtype=torch.float64))


def test_the_center_is_hidden_and_nothing_else() -> None:
    x, _ = images()
    hidden = F.occlude_center(x, [0.1, 0.2, 0.3])
    for row in range(8):
        for column in range(8):
            inside = 2 <= row < 6 and 2 <= column < 6
            expected = torch.tensor([0.1, 0.2, 0.3]).expand(4, 3) if inside else x[:, :, row, column]
            assert torch.equal(hidden[:, :, row, column], expected)
    assert torch.equal(F.occlude_center(x)[:, :, 3, 3], torch.zeros(4, 3))


@pytest.mark.parametrize("name", [NINETEEN[0], "contrast", "fog"])
def test_corruptions_are_those_of_the_data(name: str) -> None:
    """Which are held against the published ones in tests/data."""
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(F.corrupt(x, name, 2, seed=3), Corruption(name, 2, seed=3)(x, [0, 1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.attack_step(torch.rand(2, 3), torch.rand(2, 3), torch.rand(2, 3), 0.1, 0.1),
        lambda: F.attack_step(*(torch.rand(1, 1, 2, 2) for _ in range(3)), 0.1, 0.1, norm="l1"),
        lambda: F.fgsm(network(), torch.rand(2, 3, 8, 8), torch.tensor([0])),
        lambda: F.pgd(network(), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]), epsilon=-1.0),
        lambda: F.frequency_rings((4, 4), width=0.0),
        lambda: F.band_noise(torch.rand(1, 1, 4, 4), torch.ones(5, 5, dtype=torch.bool)),
        lambda: F.occlude_center(torch.rand(3, 4, 4)),
        lambda: F.corrupt(torch.rand(3, 32, 32), "fog", 1),
    ],
)
def test_a_wrong_argument_is_told(call) -> None:
    with pytest.raises(ValueError, match="must"):
        call()
