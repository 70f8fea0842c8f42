"""What holds for every family of every library, and for at least 25 architectures of timm's registry."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.attention_oracle import output_from_map
from tests.anatomy.expected import expected_units
from tests.anatomy.networks import NETWORK_PARAMS, NETWORKS, shaken
from vitclinic.anatomy import Anatomy, double_differentiable, record_attention, stream, taps
from vitclinic.anatomy.families import recognise


@pytest.fixture(params=NETWORK_PARAMS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(NETWORKS[name]()).eval()


@pytest.fixture(scope="module")
def images(network: nn.Module) -> Tensor:
    core, family = recognise(network)
    return torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def anatomy(network: nn.Module) -> Anatomy:
    return Anatomy.of(network)


@pytest.fixture(autouse=True)
def _left_as_it_was(network: nn.Module, images: Tensor) -> Iterator[None]:
    """No hook, no value and no mode of the network has changed after any test, nor have its outputs."""
    state = {name: value.clone() for name, value in network.state_dict().items()}
    before = logits(network, images)
    yield
    assert not hooks(network)
    assert not any(module.training for module in network.modules())
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(logits(network, images), before)


def logits(network: nn.Module, images: Tensor, grad: bool = False) -> Tensor:
    with torch.set_grad_enabled(grad):
        output = network(images)
    return output if isinstance(output, Tensor) else output.logits


def hooks(network: nn.Module) -> list[object]:
    kept = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
    )
    return [hook for module in network.modules() for name in kept for hook in getattr(module, name)]


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max())


def test_units_come_in_the_order_of_the_forward_pass(anatomy: Anatomy, network: nn.Module, images: Tensor) -> None:
    fired: list[int] = []
    sites = {unit.depth: unit.output for unit in anatomy.units}
    with stream(sites, lambda depth, _: fired.append(depth)):
        logits(network, images)
    assert fired == list(range(len(anatomy.units)))
    assert len({unit.name for unit in anatomy.units}) == len(anatomy.units)


def test_kinds_and_stages_are_those_that_the_network_was_built_with(
    name: str, anatomy: Anatomy, network: nn.Module
) -> None:
    assert [(unit.kind, unit.stage) for unit in anatomy.units] == expected_units(name, network)


def test_a_stage_has_one_grid_and_a_pool_leads_to_another(anatomy: Anatomy, network: nn.Module, images: Tensor) -> None:
    spatial = [unit for unit in anatomy.units if unit.output.layout.spatial]
    with taps({unit.name: unit.output for unit in spatial}) as seen:
        logits(network, images)
    shapes = {unit: anatomy.grid(unit.output, seen[unit.name]).shape[1:] for unit in spatial}
    for before, after in pairwise(spatial):
        if after.kind == "pool":
            assert shapes[before] != shapes[after]
        elif before.stage == after.stage:
            assert shapes[before] == shapes[after] or before.kind == "stem"


def test_features_come_on_their_grid(anatomy: Anatomy, network: nn.Module, images: Tensor) -> None:
    spatial = [unit for unit in anatomy.units if unit.output.layout.spatial]
    assert len(spatial) >= 3
    height, width = images.shape[-2:]
    with taps({unit.name: unit.output for unit in spatial}) as seen:
        logits(network, images)
    for unit in spatial:
        activation = seen[unit.name]
        grid = anatomy.grid(unit.output, activation)
        prefix = unit.output.layout.prefix if activation.ndim == 3 else 0
        assert grid.ndim == 4
        assert grid.shape[0] == len(images)
        # The image's aspect ratio, up to the rounding of the grid to whole cells.
        assert abs(grid.shape[2] / height - grid.shape[3] / width) <= 1 / min(height, width)
        assert activation.numel() == grid.numel() + len(images) * prefix * grid.shape[1]
        if activation.ndim == 3:
            assert anatomy.prefix(unit.output, activation).shape == (len(images), prefix, grid.shape[1])
            first_cell = activation[:, prefix]
            assert torch.equal(grid[:, :, 0, 0], first_cell)


def test_after_is_before_plus_branch(anatomy: Anatomy, network: nn.Module, images: Tensor) -> None:
    residuals = {unit.name: unit.residual for unit in anatomy.units if unit.residual}
    assert residuals
    parts = {
        (name, part): getattr(residual, part)
        for name, residual in residuals.items()
        for part in ("skip", "branch", "total")
    }
    with taps(parts) as seen:
        logits(network, images)
    for name in residuals:
        skip, branch, total = (seen[name, part].flatten() for part in ("skip", "branch", "total"))
        assert close(skip + branch, total)
        assert branch.abs().max() > 1e-3 * total.abs().max()


def test_taps_change_nothing_and_can_carry_gradients(anatomy: Anatomy, network: nn.Module, images: Tensor) -> None:
    sites = {(unit.name, end): getattr(unit, end) for unit in anatomy.units for end in ("input", "output")}
    sites |= {(unit.name, "branch"): unit.branch for unit in anatomy.units if unit.branch}
    plain = logits(network, images, grad=True)
    with taps(sites) as seen:
        assert torch.equal(logits(network, images, grad=True), plain)
    assert not any(activation.requires_grad for activation in seen.values())
    wanted = {unit.name: unit.output for unit in anatomy.units}
    with taps(wanted, grad=True) as seen:
        output = logits(network, images, grad=True)
    gradients = torch.autograd.grad(output.square().sum(), [seen[name] for name in wanted])
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_removing_a_unit_changes_the_output_until_it_is_back(
    anatomy: Anatomy, network: nn.Module, images: Tensor
) -> None:
    whole = logits(network, images)
    removable = [unit for unit in anatomy.units if unit.removal]
    assert {unit.kind for unit in removable} >= {unit.kind for unit in anatomy.units if unit.residual}
    for unit in removable:
        with anatomy.remove(unit):
            assert not close(logits(network, images), whole), unit
        assert torch.equal(logits(network, images), whole)
        if unit.removal.how == "branch set to zero":
            sites = {"skip": unit.residual.skip, "total": unit.residual.total}
            with anatomy.remove(unit), taps(sites) as seen:
                logits(network, images)
            assert torch.equal(seen["skip"].flatten(), seen["total"].flatten())


def test_a_recorded_map_times_the_values_is_the_attention_output(
    anatomy: Anatomy, network: nn.Module, images: Tensor
) -> None:
    units = [unit for unit in anatomy.of_kind("msa") if unit.attention]
    if not units:
        pytest.skip("no attention")
    maps = {}
    with record_attention(units, lambda seen: maps.__setitem__(seen.unit.name, seen)):
        recorded = logits(network, images)
    # PyTorch's fast path of nn.MultiheadAttention is off while a map is asked for.
    fused_module = any(isinstance(module, nn.MultiheadAttention) for module in network.modules())
    plain = logits(network, images)
    assert close(recorded, plain) if fused_module else torch.equal(recorded, plain)
    assert list(maps) == [unit.name for unit in units]
    for unit in units:
        seen = maps[unit.name]
        assert torch.allclose(seen.weights.sum(-1), torch.ones(()), atol=1e-5)
        assert seen.weights.shape[-1] == seen.prefix + seen.positions().shape[1]
        recomputed, own = output_from_map(seen, lambda: logits(network, images))
        assert close(recomputed, own), unit


def test_second_derivatives_exist_in_their_context(network: nn.Module, images: Tensor) -> None:
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with double_differentiable():
        loss = logits(network, images, grad=True).square().sum()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        norm = sum(gradient.square().sum() for gradient in gradients if gradient is not None)
        products = torch.autograd.grad(norm, parameters, allow_unused=True)
    assert any(product is not None and product.abs().max() > 0 for product in products)
    assert all(product is None or product.isfinite().all() for product in products)
