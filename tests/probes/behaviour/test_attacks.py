"""FGSM and PGD: against foolbox, inside their ball, stronger than noise, and honest where there is no gradient."""

import copy
import math

import foolbox
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.probes import subjects
from tests.probes.behaviour.trained import cnn, subject, trained, vit
from vitclinic._core.errors import RecipeError
from vitclinic._core.statistics import share_interval
from vitclinic.data.corruptions.noise import Ball, Draws
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.behaviour.attacks import Attack, AttackOutcomes, image_gradient, inside, loss_slope, on_surface

PEERS = {
    ("linf", 1): lambda step: foolbox.attacks.LinfFastGradientAttack(),
    ("l2", 1): lambda step: foolbox.attacks.L2FastGradientAttack(),
    ("linf", 10): lambda step: foolbox.attacks.LinfPGD(abs_stepsize=step, steps=10, random_start=False),
    ("l2", 10): lambda step: foolbox.attacks.L2PGD(abs_stepsize=step, steps=10, random_start=False),
}


def found_by(name, patient, **options):
    (found,) = measure(patient, parse_probes([{name: options}]))
    return found


@pytest.mark.parametrize("build", [cnn, vit])
@pytest.mark.parametrize(("norm", "steps"), PEERS)
def test_the_same_images_as_foolbox(build, norm, steps):
    network = copy.deepcopy(trained(build)).double()
    (batch,) = subject(build, limit=20, batch_size=20).batches()
    images, epsilon = batch.images.double(), 0.1 if norm == "linf" else 0.7
    step = epsilon if steps == 1 else epsilon / 8
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    expected, _, _ = PEERS[norm, steps](step)(model, images, batch.targets, epsilons=epsilon)
    network.zero_grad()  # foolbox leaves gradients behind
    attacked, stuck = Attack(Ball(norm, epsilon), steps, step)(network, images, batch.targets)
    assert (expected - images).abs().amax() > 0.05
    assert not stuck.any()
    torch.testing.assert_close(attacked, expected, rtol=0, atol=1e-9)
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("build", [cnn, vit])
def test_the_gradient_is_that_of_the_loss_up_to_a_factor(build):
    network = copy.deepcopy(trained(build)).double()
    (batch,) = subject(build, limit=6, batch_size=6).batches()
    x = batch.images.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(network(x), batch.targets, reduction="sum"), x)
    found = image_gradient(network, x.detach(), batch.targets)
    cosine = F.cosine_similarity(found.flatten(1), expected.flatten(1))
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_a_sure_network_has_a_direction_where_its_loss_has_no_gradient():
    logits = torch.tensor([[900.0, 0.0, -10.0]])
    slope = loss_slope(logits, torch.tensor([0]))
    torch.testing.assert_close(slope, torch.tensor([[-1 - math.exp(-10), 1.0, math.exp(-10)]]))
    raised = logits.clone().requires_grad_()
    F.cross_entropy(raised, torch.tensor([0])).backward()
    assert (raised.grad == 0).all()
    assert (loss_slope(torch.tensor([[5.0]]), torch.tensor([0])) == 0).all()  # one class: nothing to be taken for


@given(
    st.sampled_from(["linf", "l2"]),
    st.just(0.0) | st.floats(1e-6, 3),  # the squares of far smaller ones vanish in float32
    st.integers(0, 1000),
    st.floats(1e-6, 1e6),
)
@settings(deadline=None, max_examples=60)
def test_the_nearest_image_is_in_the_ball_and_in_the_unit_interval(norm, epsilon, seed, far):
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(3, 2, 4, 5, generator=random)
    ball = Ball(norm, epsilon)
    moved = ball.nearest(images, images + far * torch.randn(3, 2, 4, 5, generator=random))
    assert moved.min() >= 0
    assert moved.max() <= 1
    sizes = (moved - images).flatten(1).norm(p=math.inf if norm == "linf" else 2, dim=1)
    assert (sizes <= epsilon * (1 + 1e-5) + 1e-6).all()
    torch.testing.assert_close(ball.nearest(images, images), images)
    draws = Draws("test", seed, range(3))
    for changes, least in ((inside(ball, draws, (2, 4, 5)), 0.0), (on_surface(ball, draws, (2, 4, 5)), 1.0)):
        sizes = changes.flatten(1).norm(p=math.inf if norm == "linf" else 2, dim=1)
        assert (sizes <= epsilon * (1 + 1e-5)).all()
        assert (sizes >= least * epsilon * (1 - 1e-5)).all()


def test_random_starts_fill_the_ball():
    """In l_2, a share r^d of the ball lies within r of its centre."""
    changes = inside(Ball("l2", 2.0), Draws("test", 0, range(4000)), (1, 1, 3))
    sizes = changes.flatten(1).norm(dim=1)
    assert (sizes < 1).double().mean() == pytest.approx(1 / 8, abs=0.02)
    flat = inside(Ball("linf", 2.0), Draws("test", 0, range(4000)), (1, 1, 1)).flatten()
    assert (flat < 1).double().mean() == pytest.approx(3 / 4, abs=0.03)


def test_directions_survive_gradients_that_are_tiny_huge_or_no_numbers():
    gradient = torch.tensor([[3e-30, 4e-30], [3e30, 4e30], [math.nan, 2.0], [0.0, 0.0]])[:, None, None]
    steepest = Ball("l2", 1.0).steepest(gradient)[:, 0, 0]
    torch.testing.assert_close(steepest, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 1.0], [0.0, 0.0]]))
    assert Ball("linf", 1.0).steepest(gradient)[:, 0, 0].tolist() == [[1, 1], [1, 1], [0, 1], [0, 0]]


@pytest.mark.parametrize("build", [cnn, vit])
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.1), ("l2", 0.6)])
def test_pgd_is_not_weaker_than_fgsm_nor_fgsm_than_noise(build, norm, epsilon):
    patient = subject(build)
    fgsm = found_by("fgsm", patient, norm=norm, epsilon=epsilon)
    pgd = found_by("pgd", patient, norm=norm, epsilon=epsilon)
    again = found_by("pgd", patient, norm=norm, epsilon=epsilon, restarts=2)
    assert fgsm.status == pgd.status == again.status == "ok", (fgsm.reason, pgd.reason, again.reason)
    robust = [found.scalars["robust_accuracy"].value for found in (again, pgd, fgsm)]
    assert robust == sorted(robust)
    assert robust[2] < fgsm.scalars["noise_accuracy"].value <= fgsm.scalars["clean_accuracy"].value
    assert robust[0] < robust[2]
    assert (again.arrays["robust"] <= pgd.arrays["robust"]).all()  # what one attempt fools, three do


def test_the_numbers_are_counts_of_images():
    patient = subject(cnn)
    found = found_by("fgsm", patient, epsilon=0.1)
    clean, robust = 0, 0
    for batch in subject(cnn, batch_size=1).batches():
        x = batch.images.clone().requires_grad_()
        logits = patient.network(x)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, batch.targets), x)
        attacked = (batch.images + 0.1 * gradient.sign()).clamp(0, 1)
        right = bool(logits.argmax() == batch.targets)
        clean += right
        robust += right and bool(patient.network(attacked).argmax() == batch.targets)
    n, scalars = len(patient), found.scalars
    assert (scalars["clean_accuracy"].value, scalars["robust_accuracy"].value) == (clean / n, robust / n)
    assert (scalars["success"].value, scalars["success"].n) == ((clean - robust) / clean, clean)
    assert (scalars["success"].low, scalars["success"].high) == share_interval(clean - robust, clean)
    assert scalars["drop"].value == pytest.approx((clean - robust) / n)
    assert scalars["epsilon"].value == 0.1
    assert scalars["zero_gradient_share"].value == 0


@pytest.mark.parametrize("batch_size", [7, 64])
def test_the_batch_size_changes_nothing(batch_size):
    expected = found_by("pgd", subject(vit, limit=60), epsilon=0.1, restarts=1)
    found = found_by("pgd", subject(vit, limit=60, batch_size=batch_size), epsilon=0.1, restarts=1)
    assert found.scalars == expected.scalars


def test_an_attack_of_no_size_changes_nothing():
    found = found_by("pgd", subject(cnn, limit=40), epsilon=0.0)
    assert found.status == "ok"
    assert found.scalars["robust_accuracy"] == found.scalars["clean_accuracy"]


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_largest_attack_of_all_moves_the_images(norm):
    found = found_by("pgd", subject(cnn, limit=40), epsilon=1e6, step=1e6, norm=norm, random_start=True)
    assert found.status == "ok", found.reason
    assert found.scalars["robust_accuracy"].value == 0


class Rounding(nn.Module):
    """The network behind a step function: it is as easily fooled, and has no gradient."""

    def __init__(self, network, slope=0.0):
        super().__init__()
        self.network, self.slope = network, slope

    def forward(self, x):
        rounded = (x.detach() * 16).round() / 16
        return self.network(rounded + self.slope * (x - x.detach()))


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_zero_gradients_are_said(name):
    patient = Subject(Rounding(trained(cnn)), subject(cnn).dataset, limit=40)
    found = found_by(name, patient, epsilon=0.03)
    assert found.status == "not_converged"
    assert found.scalars["zero_gradient_share"].value > 0.9
    assert "the gradient is zero for" in found.reason
    assert "upper bound" in found.reason


def test_a_network_whose_output_has_no_graph_is_said():
    class Graphless(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return trained(cnn)(x)

    found = found_by("fgsm", Subject(Graphless(), subject(cnn).dataset, limit=20))
    assert found.status == "not_converged"
    assert found.scalars["zero_gradient_share"].value == 1


def test_masked_gradients_are_said():
    """A gradient that points the wrong way: the attack makes the network surer, noise fools it."""
    patient = Subject(Rounding(trained(cnn), slope=-1.0), subject(cnn).dataset, limit=100)
    found = found_by("fgsm", patient, epsilon=0.3)
    assert found.status == "not_converged"
    assert "the gradient is masked" in found.reason


class Junk(nn.Module):
    """As easily fooled as the network behind the step function, with a gradient that has nothing to do with it."""

    def __init__(self, network):
        super().__init__()
        self.network = Rounding(network)
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(64, 10, generator=generator)

    def forward(self, x):
        return self.network(x) + 1e-4 * (x.flatten(1) @ self.weight)


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
@pytest.mark.parametrize("epsilon", [0.05, 0.1])
def test_gradients_that_say_nothing_are_masked_though_noise_fools_no_more(name, epsilon):
    found = found_by(name, Subject(Junk(trained(cnn)), subject(cnn).dataset, limit=100), epsilon=epsilon)
    assert found.status == "not_converged"
    assert "the gradient is masked" in found.reason
    plain = found_by(name, subject(cnn), epsilon=epsilon)
    assert plain.status == "ok", plain.reason


def test_a_zero_gradient_counts_where_the_image_withstands():
    outcomes = AttackOutcomes(4)
    outcomes.clean[:], outcomes.in_noise[:], outcomes.above_noise[:] = True, True, True
    outcomes.stuck[:2], outcomes.robust[1:3] = True, True
    (fgsm,) = parse_probes(["fgsm"])
    found = fgsm._result(outcomes)
    assert found.scalars["zero_gradient_share"].value == 1 / 4
    assert "zero for 1 of the 4 attacked" in found.reason


def test_every_restart_begins_somewhere_else(monkeypatch):
    starts = []

    def watched(self, network, images, targets, start=None):
        starts.append(start)
        return images, torch.zeros(len(images), dtype=torch.bool)  # withstands, so that all restarts are made

    monkeypatch.setattr(Attack, "__call__", watched)
    found_by("fgsm", subject(cnn, batch_size=1000), epsilon=0.1, restarts=2)
    assert starts[0] is None
    assert len(starts) == 3
    assert not torch.equal(starts[1], starts[2])


def test_no_image_recognised_is_no_error():
    network = copy.deepcopy(trained(cnn))
    with torch.no_grad():
        network.backbone[-1].bias[3] += 1e6
    patient = Subject(network, subject(cnn).dataset)
    at = np.flatnonzero(patient.images.labels != 3)
    split = type(patient.images)(patient.images.images, patient.images.rows[at], patient.images.labels[at])
    dataset = type(patient.dataset)(
        "no threes", patient.classes, (8, 8), 1, {**patient.dataset.splits, "test": split}, "no threes"
    )
    found = found_by("pgd", Subject(network, dataset))
    assert found.status == "ok", found.reason
    assert found.scalars["robust_accuracy"].value == 0
    assert "success" not in found.scalars


def test_half_precision_is_attacked_in_finer_steps_than_its_own():
    network = copy.deepcopy(trained(cnn)).bfloat16()
    found = found_by("pgd", Subject(network, subject(cnn).dataset, limit=100), epsilon=0.1)
    expected = found_by("pgd", subject(cnn, limit=100), epsilon=0.1)
    assert found.status == "ok", found.reason
    assert found.scalars["robust_accuracy"].value == pytest.approx(expected.scalars["robust_accuracy"].value, abs=0.1)


def test_it_says_what_it_costs_at_most():
    patient = subjects.subject("unknown")
    (probe,) = parse_probes([{"pgd": {"steps": 3, "restarts": 1}}])
    assert patient.outputs == 5
    seen = []
    patient.network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    measure(patient, [probe])
    assert 0 < sum(seen) <= probe.forwards(patient)
    assert probe.forwards(patient) == 22 * (2 + 2 * (3 * 2 + 1))


def test_options_that_make_no_sense():
    with pytest.raises(RecipeError, match=r"'probes\.pgd\.epsilon'"):
        parse_probes([{"pgd": {"epsilon": -1.0}}])
    with pytest.raises(RecipeError, match=r"'probes\.pgd\.epsilon'"):
        parse_probes([{"pgd": {"epsilon": 1e20, "norm": "l2"}}])  # whose square is no float32
    (fgsm,) = parse_probes([{"fgsm": {"epsilon": "4/255"}}])
    assert fgsm.epsilon == 4 / 255
    with pytest.raises(RecipeError, match=r"'probes\.fgsm\.epsilon'"):
        parse_probes([{"fgsm": {"epsilon": "4/0"}}])
    (pgd,) = parse_probes(["pgd"])
    assert (pgd.ball.epsilon, pgd.attack.step) == pytest.approx((2 / 255, 0.25 / 255))


def test_a_random_start_is_somewhere_else_and_follows_the_seed():
    patient, other = subject(vit), subject(vit, seed=1)
    plain, started = (found_by("fgsm", patient, epsilon=0.1, random_start=start) for start in (False, True))
    elsewhere = found_by("fgsm", other, epsilon=0.1, random_start=True)
    robust = [found.arrays["robust"].tolist() for found in (plain, started, elsewhere)]
    assert robust[0] != robust[1] != robust[2]
    assert plain.arrays["robust"].tolist() == found_by("fgsm", other, epsilon=0.1).arrays["robust"].tolist()
