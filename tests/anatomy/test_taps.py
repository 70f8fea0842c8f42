"""Reading activations: what a tap sees, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.networks import shaken, tiny_vit
from tests.anatomy.test_contract import hooks
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, into, out_of, record_attention, stream, taps

IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


class Twice(nn.Module):
    """A block that calls one module twice, and writes into what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Hardtanh(-100, 100)

    def forward(self, x: Tensor) -> Tensor:
        first = self.shared(x)
        second = self.shared(input=first + 1)
        first += 10
        return second


def test_a_tap_that_nothing_passed_is_an_error_that_names_it() -> None:
    network = tiny_vit()
    with (
        pytest.raises(AnatomyError, match="the taps 'unused' were never reached"),
        taps({"unused": out_of(nn.Identity()), "used": out_of(network.head)}),
    ):
        network(IMAGES)
    assert not hooks(network)
    many = {number: out_of(nn.Identity()) for number in range(9)}
    with pytest.raises(AnatomyError, match="the taps 0, 1, 2, 6 more were never reached"), taps(many):
        pass


def test_hooks_come_off_when_the_forward_pass_or_the_consumer_fails() -> None:
    network = tiny_vit()
    unit = Anatomy.of(network).units[3]

    def refuse(key: str, activation: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stream({"x": unit.output}, refuse):
        network(IMAGES)
    with pytest.raises(AssertionError, match="Input height"), taps({"x": unit.output}):
        network(IMAGES[:, :, :16])
    assert not hooks(network)


@pytest.mark.parametrize("call", [0, 1])
def test_each_call_of_a_shared_module_has_its_own_site(call: int) -> None:
    block = Twice()
    site = into(block.shared, within=block, call=call, overwritten=True)
    with taps({"x": site}) as seen:
        for value in (1.0, 5.0):
            block(torch.tensor([value]))
            assert seen["x"].item() == value + call


def test_reading_what_the_network_has_overwritten_is_an_error_unless_it_was_copied() -> None:
    block = Twice()
    plain = out_of(block.shared, within=block, call=0)
    copied = out_of(block.shared, within=block, call=0, overwritten=True)
    with taps({"plain": plain, "copied": copied}) as seen:
        block(torch.ones(1))
    assert seen["copied"].item() == 1
    with pytest.raises(AnatomyError, match="'plain' in place"):
        seen["plain"]


def test_a_stream_keeps_nothing() -> None:
    network = shaken(tiny_vit()).eval()
    alive: list[weakref.ref[Tensor]] = []
    unit = Anatomy.of(network).units[3]
    with (
        stream({"x": unit.output}, lambda _, activation: alive.append(weakref.ref(activation))),
        torch.no_grad(),
    ):
        for _ in range(3):
            network(IMAGES)
        gc.collect()
        assert len(alive) == 3
        assert not any(reference() is not None for reference in alive)


def test_residuals_hold_in_training_mode_too() -> None:
    network = shaken(tiny_vit(drop_path_rate=0.5, proj_drop_rate=0.2)).train()
    network.patch_embed.eval()
    modes = {name: module.training for name, module in network.named_modules()}
    anatomy = Anatomy.of(network)
    assert {name: module.training for name, module in network.named_modules()} == modes
    sites = {
        (unit.name, part): getattr(unit.residual, part)
        for unit in anatomy.units
        if unit.residual
        for part in ("skip", "branch", "total")
    }
    with taps(sites) as seen:
        network(IMAGES)
    for unit in anatomy.units:
        if unit.residual:
            skip, branch, total = (seen[unit.name, part] for part in ("skip", "branch", "total"))
            torch.testing.assert_close(skip + branch, total)


def test_examining_draws_no_random_numbers() -> None:
    network = tiny_vit(drop_path_rate=0.5).train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Anatomy.of(network)
    assert torch.equal(torch.rand(1), expected)


def test_a_compiled_network_is_read_as_well() -> None:
    network = shaken(tiny_vit()).eval()
    compiled: Any = torch.compile(network, backend="eager")
    with torch.no_grad():
        compiled(IMAGES)  # the graph exists before the hooks do
        anatomy = Anatomy.of(compiled)
        assert anatomy.network is network
        with taps({"x": anatomy.units[3].output}) as seen:
            compiled(IMAGES)
        with taps({"x": anatomy.units[3].output}) as expected:
            network(IMAGES)
        assert torch.equal(seen["x"], expected["x"])
        whole = compiled(IMAGES)
        with anatomy.remove(anatomy.units[3]):
            assert not torch.allclose(compiled(IMAGES), whole)
    assert not hooks(network)


def test_what_checkpointing_recomputes_is_not_seen_again() -> None:
    network = shaken(tiny_vit()).train()
    anatomy = Anatomy.of(network)
    plain_sites = {unit.name: unit.output for unit in anatomy.units}
    with taps(plain_sites, grad=True) as seen:
        expected = torch.autograd.grad(network(IMAGES).square().sum(), [seen[name] for name in plain_sites])
    network.set_grad_checkpointing(True)
    fired: list[str] = []
    maps: list[str] = []
    with (
        stream(plain_sites, lambda name, _: fired.append(name)),
        record_attention(anatomy.of_kind("msa"), lambda map_: maps.append(map_.unit.name)),
        taps(plain_sites, grad=True) as seen,
    ):
        loss = network(IMAGES).square().sum()
        gradients = torch.autograd.grad(loss, [seen[name] for name in plain_sites])
    assert fired == list(plain_sites)
    assert maps == [unit.name for unit in anatomy.of_kind("msa")]
    for actual, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_taps_read_in_inference_mode() -> None:
    network = tiny_vit().eval()
    unit = Anatomy.of(network).units[-2]
    image = torch.rand(1, 3, 32, 48)
    with torch.inference_mode(), taps({"last": unit.output}) as seen:
        network(image)
        within = seen["last"].clone()
    with torch.no_grad(), taps({"last": unit.output}) as again:
        network(image)
    torch.testing.assert_close(within, again["last"])
    with torch.inference_mode():
        assert Anatomy.of(network).units[-2].name == unit.name
