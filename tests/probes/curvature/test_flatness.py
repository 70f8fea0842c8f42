"""Average flatness against closed forms and against copies of the network with noise added to them."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.probes.curvature.networks import NETWORKS, batches, network
from tests.probes.subjects import subject
from vitclinic.data import Batch
from vitclinic.data.randomness import torch_seed
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.curvature.displacement import Displacement
from vitclinic.probes.curvature.flatness import Flatness, sample_losses, standard_error
from vitclinic.probes.curvature.loss_surface import LossSurface, Mode


class Quadratic(LossSurface):
    """L(w) = 1/2 w^T A w, with A of trace 13."""

    A = torch.tensor([[3.0, 1.0, 0.0], [1.0, 6.0, -2.0], [0.0, -2.0, 4.0]], dtype=torch.float64)

    def __init__(self) -> None:
        holder = nn.Module()
        holder.w = nn.Parameter(torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64))
        super().__init__(holder, batches((1,)))

    def total_loss(self, batch: Batch) -> Tensor:
        (w,) = self.weights
        return w @ self.A @ w / 2


def test_the_flatness_of_a_quadratic_loss_is_its_value_and_half_sigma_squared_trace() -> None:
    surface, sigma = Quadratic(), 0.3
    exact = surface.value() + sigma**2 / 2 * 13
    slope = surface.A @ surface.weights[0].detach()
    deviation = math.sqrt(sigma**2 * float(slope @ slope) + sigma**4 / 2 * float((surface.A @ surface.A).trace()))
    errors = []
    for draws in (100, 6400):
        losses = sample_losses(surface, sigma, draws)
        assert standard_error(losses) == pytest.approx(deviation / math.sqrt(draws), rel=0.2)
        errors.append(abs(losses.mean() - exact))
        assert errors[-1] < 3 * standard_error(losses)
    assert errors[1] < 3 * deviation / 80


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_equal_those_of_copies_with_noise_and_the_network_is_as_before(name: str, mode: Mode) -> None:
    net, data = network(name), batches()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    surface = LossSurface(net, data, mode=mode)
    with surface.evaluation_mode():
        found = sample_losses(surface, 0.1, 3, seed=7)
    for draw, loss in enumerate(found):
        twin = copy.deepcopy(net)
        for module in twin.modules():
            module.training = mode == "train" and isinstance(module, nn.BatchNorm2d)
        generator = torch.Generator().manual_seed(torch_seed("flatness", 7, draw))
        with torch.no_grad():
            for p in twin.parameters():
                p += torch.empty_like(p).normal_(0, 0.1, generator=generator)
            outputs = torch.cat([twin(batch.images) for batch in data])
        expected = F.cross_entropy(outputs, torch.cat([batch.targets for batch in data]))
        assert loss == pytest.approx(float(expected), rel=1e-12)
    assert len(set(found)) == 3
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_weights_come_back_bit_for_bit_also_on_errors_and_a_graph_made_before_still_works() -> None:
    net = network("vit").float()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    images = torch.rand(2, 3, 4, 4)
    loss = net(images).sum()
    displacement = Displacement(list(net.parameters()))

    def interrupted() -> None:
        with displacement:
            displacement.by_noise(0.37, 1)
            assert not torch.equal(net.head.weight, before["head.weight"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    loss.backward()


def losses_of(seed: int = 0, batch_size: int = 8, **options: object) -> np.ndarray:
    patient = subject("vit", seed=seed, batch_size=batch_size)
    (found,) = measure(patient, parse_probes([{"flatness": {"draws": 4, "sigma": 0.1, **options}}]))
    return found.arrays["losses"]


def test_the_draws_are_those_of_the_seed_whatever_the_batch_size() -> None:
    expected = losses_of()
    np.testing.assert_allclose(losses_of(batch_size=5), expected, rtol=1e-5)
    assert not np.isclose(losses_of(seed=1), expected, rtol=1e-4).any()


def test_enough_draws_are_enough_and_all_are_made_where_none_is() -> None:
    patient = subject("vit")
    (full,) = measure(patient, parse_probes([{"flatness": {"draws": 60, "sigma": 0.05, "precision": 0.0}}]))
    losses = full.arrays["losses"]
    errors = [np.inf if n < 10 else losses[:n].std(ddof=1) / math.sqrt(n) / losses[:n].mean() for n in range(60)]
    precision = float(errors[30]) * 1.0001
    first = next(n for n, error in enumerate(errors) if error <= precision)
    (some,) = measure(patient, parse_probes([{"flatness": {"draws": 60, "sigma": 0.05, "precision": precision}}]))
    assert (full.status, len(losses)) == ("ok", 60)
    assert (some.status, some.scalars["flatness"].n) == ("ok", first)
    np.testing.assert_array_equal(some.arrays["losses"], losses[:first])
    (few,) = measure(patient, parse_probes([{"flatness": {"draws": 12, "sigma": 0.05, "precision": 1e-9}}]))
    assert few.status == "not_converged"
    assert few.reason == (
        f"after 12 draws the standard error is {few.scalars['standard_error'].value:.2g} and the mean"
        f" {few.scalars['flatness'].value:.4g}; requested was a share of 1e-09."
    )


def test_the_interval_is_the_t_interval_and_sigma_stands_beside_the_number() -> None:
    patient = subject("vit")
    (found,) = measure(patient, parse_probes([{"flatness": {"draws": 10, "sigma": 0.02}}]))
    losses, flatness = found.arrays["losses"], found.scalars["flatness"]
    assert flatness.value == pytest.approx(losses.mean())
    assert flatness.high - flatness.value == pytest.approx(2.262157 * losses.std(ddof=1) / math.sqrt(10), rel=1e-6)
    assert found.scalars["sigma"].value == 0.02
    images, labels = (torch.cat(part) for part in zip(*[(b.images, b.targets) for b in patient.batches()], strict=True))
    expected = F.cross_entropy(patient.network.eval()(images), labels).detach()
    assert found.scalars["loss"].value == pytest.approx(float(expected), rel=1e-5)


def test_a_budget_ends_it_with_what_there_is() -> None:
    (found,) = measure(subject("vit"), parse_probes([{"flatness": {"budget": 0.0001}}]))
    assert (found.status, found.scalars["flatness"].n) == ("not_converged", 1)
    assert (
        found.reason
        == "after 1 draws the standard error is unknown; requested was a share of 0.01, of at least 10 draws."
    )


def test_noise_that_breaks_the_network_is_said() -> None:
    (found,) = measure(subject("vit"), parse_probes([{"flatness": {"sigma": 1e38}}]))
    assert found.status == "not_converged"
    assert "use a smaller sigma" in (found.reason or "")
    assert not math.isfinite(found.scalars["flatness"].value)


def test_too_few_draws_to_judge_says_how_many_there_must_be() -> None:
    probe = Flatness(draws=4, precision=0.5)
    reason = probe._shortcoming(np.array([1.0, 1.0, 1.1, 1.0]))
    assert reason is not None
    assert reason.endswith("requested was a share of 0.5, of at least 10 draws.")
