"""The tangent kernel against a dense float64 Jacobian computed by another route, and its condition number."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitclinic
from tests.probes.curvature.networks import NETWORKS, batches, network
from tests.probes.subjects import CLASSES, Unknown, noise, subject
from vitclinic._core.errors import ModelError
from vitclinic.probes import NTK, measure
from vitclinic.probes.curvature.tangent_kernel import TangentKernel, conditioning, recompute_batch_norm, replace_gelu


def dense_jacobian(net: nn.Module, images: Tensor) -> Tensor:
    """[m, n] by reverse-mode derivatives of all summed outputs at once, in float64."""
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]

    def outputs(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        weights = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        return functional_call(net, weights, (images,)).sum(1)

    with sdpa_kernel(SDPBackend.MATH):
        return jacrev(outputs)(torch.cat([p.detach().flatten() for p in net.parameters()]))


def dense_kernel(net: nn.Module, images: Tensor) -> Tensor:
    jacobian = dense_jacobian(net, images)
    return jacobian @ jacobian.T


def pixels(count: int = 9) -> Tensor:
    return batches((count,))[0].images


@pytest.mark.parametrize("memory", [2**30, 20_000], ids=["at once", "in groups"])
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_that_of_the_dense_jacobian(name: str, memory: int) -> None:
    net = network(name)
    kernel = TangentKernel(net, memory=memory, at_a_time=4)
    assert (len(kernel.groups(9)) == 1) == (memory == 2**30)
    torch.testing.assert_close(kernel(pixels()), dense_kernel(net, pixels()), rtol=1e-10, atol=1e-10)
    assert not kernel.one_by_one


def test_a_parameter_that_is_larger_than_the_memory_comes_in_parts() -> None:
    net = network("mlp")
    kernel = TangentKernel(net, memory=4000)
    groups = kernel.groups(9)
    assert max(group.width for group in groups) * 9 * 8 <= 4000 / 2
    assert [group.names for group in groups].count(("1.weight",)) == 6
    assert sum(group.width for group in groups) == sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(kernel(pixels()), dense_kernel(net, pixels()), rtol=1e-10, atol=1e-10)


def test_what_is_held_stays_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net, held = network("vit"), []
    jacobian, gradients = TangentKernel._jacobian, TangentKernel._gradients

    def seen(self, group, images):
        held.append(jacobian(self, group, images).nbytes)
        return jacobian(self, group, images)

    def seen_gradients(self, names, images):
        found = gradients(self, names, images)
        held.append(sum(part.nbytes for part in found.values()))
        return found

    monkeypatch.setattr(TangentKernel, "_jacobian", seen)
    monkeypatch.setattr(TangentKernel, "_gradients", seen_gradients)
    TangentKernel(net, memory=30_000)(pixels())
    assert 10_000 < max(held) <= 15_000


class Unmappable(nn.Module):
    """Looks at its numbers, which a function mapped over images must not do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("mlp")
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if float(x.detach().sum()) > 0 else 1.0)


def test_a_network_that_cannot_be_mapped_passes_its_images_one_by_one() -> None:
    net = Unmappable()
    kernel = TangentKernel(net, memory=4000)
    torch.testing.assert_close(kernel(pixels()), 4 * dense_kernel(net.inner, pixels()), rtol=1e-10, atol=1e-10)
    assert kernel.one_by_one


def test_frozen_and_tied_parameters_count_once() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)).double()
    net[3].weight = net[1].weight
    net[1].bias.requires_grad_(False)
    kernel = TangentKernel(net)
    assert list(kernel.parameters) == ["1.weight", "1.bias", "3.bias"]
    torch.testing.assert_close(kernel(pixels()), dense_kernel(net, pixels()), rtol=1e-10, atol=1e-10)
    assert [p.requires_grad for p in net.parameters()] == [True, False, True]


def test_a_linear_model_has_a_kernel_in_closed_form() -> None:
    """sum_k (w_k x + b_k) has the gradient (x, 1) for each of K outputs: Theta = K (X X^T + 1)."""
    images = torch.eye(6, dtype=torch.float64)
    theta = TangentKernel(nn.Linear(6, 4).double())(images)
    torch.testing.assert_close(theta, 4 * (images + 1), rtol=1e-12, atol=0)
    assert conditioning(theta, 1e-16).kappa == pytest.approx(7)  # K (1 + m) over K


def test_float32_agrees_with_float64_where_it_says_that_it_is_resolved() -> None:
    net, images = network("vit"), pixels()
    exact = conditioning(TangentKernel(net)(images), 1e-16)
    kernel = TangentKernel(net.float())
    found = conditioning(kernel(images.float()), kernel.rounding)
    assert found.resolved
    assert found.kappa == pytest.approx(exact.kappa, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_images_give_a_lower_bound(dtype: torch.dtype) -> None:
    net, images = network("vit").to(dtype), pixels().to(dtype)
    images[3] = images[7]
    kernel = TangentKernel(net)
    found = conditioning(kernel(images), kernel.rounding)
    assert not found.resolved
    assert np.isfinite(found.kappa)
    others = torch.cat([images[:3], images[4:]])
    assert found.kappa > conditioning(kernel(others), kernel.rounding).kappa


def test_relu_stands_in_for_every_gelu_and_goes_again() -> None:
    class QuickGELU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(1.702 * x)

    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(input=x)

    x = torch.linspace(-2, 2, 9)
    for gelu in (nn.GELU(), nn.GELU("tanh"), QuickGELU(), Functional()):
        net = nn.Sequential(gelu)
        before = net(x)
        with replace_gelu(net):
            assert torch.equal(net(x), x.clamp(min=0)), gelu
        assert torch.equal(net(x), before)
        assert net[0] is gelu


def test_statistics_are_those_of_the_images_and_go_again() -> None:
    net, images = network("convnet"), batches((12,))[0].images
    twin = copy.deepcopy(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with recompute_batch_norm(net, images.split(12)):
        assert not net[1].training
        first = net[0](images).transpose(0, 1).flatten(1)
        torch.testing.assert_close(net[1].running_mean, first.mean(1))
        torch.testing.assert_close(net[1].running_var, first.var(1))
        for norm in (twin[1], twin[4]):
            norm.train().momentum = 1.0
        twin(images)
        torch.testing.assert_close(
            TangentKernel(net)(images), dense_kernel(twin.eval(), images), rtol=1e-10, atol=1e-10
        )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[1].momentum == 0.1


def test_a_norm_without_running_statistics_is_given_some() -> None:
    net, images = network("convnet"), batches((12,))[0].images
    net[1] = nn.BatchNorm2d(4, track_running_stats=False).double()
    net.eval()
    with recompute_batch_norm(net, images.split(4)):
        alone = torch.cat([net(image[None]) for image in images])
        torch.testing.assert_close(alone, net(images))
    assert net[1].running_mean is None
    assert not net[1].track_running_stats


def test_the_probe_averages_the_condition_numbers_of_its_blocks() -> None:
    patient = subject("vit")
    (found,) = measure(patient, [NTK(block=5, relu=False)])
    assert found.status == "ok"
    assert found.arrays["eigenvalues"].shape == (4, 5)  # two of 22 images fill no block
    kappa = found.scalars["condition_number"]
    each = found.arrays["eigenvalues"][:, 0] / found.arrays["eigenvalues"][:, -1]
    np.testing.assert_allclose(found.arrays["condition_number"], each)
    assert kappa.value == pytest.approx(each.mean())
    assert kappa.n == 4
    assert 1 <= kappa.low < kappa.value < kappa.high
    images = torch.cat([batch.images for batch in patient.on("train").batches()]).double()
    trace = dense_jacobian(copy.deepcopy(patient.network).eval().double(), images).square().sum(1)
    assert trace.min() * 20 <= found.arrays["eigenvalues"].sum() <= trace.sum()


def test_a_head_of_zeros_is_drawn_while_measuring_and_comes_back() -> None:
    patient = subject("mixer")
    head = patient.network.get_submodule("head")
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.weight)
    before = copy.deepcopy(patient.network.state_dict())
    (plain,), (drawn,) = (measure(patient, [NTK(block=5, head=deviation)]) for deviation in (None, 0.02))
    for name, value in patient.network.state_dict().items():
        assert torch.equal(value, before[name]), name
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(patient.seed)) * 0.02)
    (by_hand,) = measure(patient, [NTK(block=5)])
    assert drawn.scalars["condition_number"].value == pytest.approx(by_hand.scalars["condition_number"].value)
    assert drawn.scalars["lambda_1"].value > plain.scalars["lambda_1"].value, "more than the head has a gradient"


def test_the_order_is_the_seeds_and_whole_blocks_are_one_kernel() -> None:
    whole = [measure(subject("unknown", seed=seed), [NTK(relu=False)])[0].scalars["lambda_1"].value for seed in (0, 1)]
    assert whole[0] == pytest.approx(whole[1], rel=1e-6)  # a permutation of the images permutes the kernel
    blocks = [measure(subject("unknown", seed=seed), [NTK(block=4)])[0].scalars["lambda_1"].value for seed in (0, 1)]
    assert blocks[0] != pytest.approx(blocks[1], rel=1e-3)


def test_images_at_a_time_do_not_matter() -> None:
    found = [measure(subject("resnet", batch_size=size), [NTK()])[0].scalars for size in (3, 22)]
    assert found[0]["condition_number"].value == pytest.approx(found[1]["condition_number"].value, rel=1e-3)


def test_batch_norm_and_gelu_are_settings() -> None:
    resnet = {mode: measure(subject("resnet"), [NTK(batch_norm=mode)])[0] for mode in ("measured", "running")}
    assert resnet["measured"].scalars["lambda_1"] != resnet["running"].scalars["lambda_1"]
    vit = {relu: measure(subject("vit"), [NTK(relu=relu)])[0] for relu in (True, False)}
    assert vit[True].scalars["lambda_1"] != vit[False].scalars["lambda_1"]


def test_a_budget_gives_the_blocks_so_far() -> None:
    (found,) = measure(subject("unknown"), [NTK(block=4, budget="0.000001s")])
    assert found.status == "not_converged"
    assert "after 1 of 5 blocks" in found.reason
    assert found.scalars["condition_number"].n == 1


def test_a_lower_bound_says_so() -> None:
    (found,) = measure(subject("unknown", dataset=noise(4, classes=2)), [NTK(images=4)])
    assert found.status == "ok"
    flat = noise(6)
    flat.splits["train"].images.pixels[:] = 100
    (found,) = measure(subject("unknown", dataset=flat), [NTK(block=3)])
    assert found.status == "not_converged"
    assert "in 2 of 2 blocks" in found.reason
    assert found.scalars["condition_number"].high == np.inf


def test_random_constant_and_broken_networks_are_refused() -> None:
    class Noisy(Unknown):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(CLASSES)

    (found,) = measure(subject(Noisy()), [NTK()])
    assert (found.status, "differ between two passes" in found.reason) == ("failed", True)
    broken = Unknown()
    nn.init.constant_(broken.head.weight, float("nan"))
    (found,) = measure(subject(broken), [NTK()])
    assert (found.status, "not finite" in found.reason) == ("failed", True)
    with pytest.raises(ModelError, match="are all zero"):
        conditioning(torch.zeros(3, 3, dtype=torch.float64), 1e-7)
    stateless = Unknown()
    stateless.body[1] = nn.BatchNorm2d(6, track_running_stats=False)
    (found,) = measure(subject(stateless), [NTK(batch_norm="running")])
    assert found.status == "does_not_apply"


def test_three_lines_on_a_network_of_ones_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exam = vitclinic.examine(Unknown(), data=noise(), probes=[{"ntk": {"block": 8}}])
    assert exam["ntk"].scalars["condition_number"].value > 1
