"""Compiled networks: a graph that was made of one network is not run for another one of its class with other hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import config

from tests.treatments.handwritten import SIZE, OwnViT
from vitclinic.data import ImageSpec
from vitclinic.probes import ProbeCollection
from vitclinic.treatments import treat

IMAGES = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
SPEC = ImageSpec(num_classes=5, in_chans=3, img_size=(SIZE, SIZE))
HOOKED = ("context_broadcasting", "gap_head")


@pytest.fixture(autouse=True)
def _unguarded() -> Iterator[None]:
    """Start as a new process does, whatever ran before."""
    torch._dynamo.reset()
    with config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch._dynamo.reset()


def compiled(network: Any) -> Any:
    return torch.compile(network, backend="eager")


@pytest.mark.parametrize("treatment", HOOKED)
def test_a_treated_network_does_not_run_the_graph_of_an_untreated_one(treatment: str) -> None:
    plain = OwnViT().eval()
    untreated, treated = OwnViT().eval(), OwnViT().eval()
    treated.load_state_dict(plain.state_dict())
    untreated.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected = plain(IMAGES)
        first = compiled(plain)
        first(IMAGES)
        treat(treated, treatment, spec=SPEC)
        of_treated = treated(IMAGES)
        assert not torch.allclose(of_treated, expected)
        torch.testing.assert_close(compiled(untreated)(IMAGES), expected)
        torch.testing.assert_close(compiled(treated)(IMAGES), of_treated)
        torch.testing.assert_close(first(IMAGES), expected)


def test_a_network_that_ran_compiled_runs_treated_afterwards() -> None:
    network = OwnViT().eval()
    wrapped = compiled(network)
    with torch.no_grad():
        before = wrapped(IMAGES)
        treat(wrapped, "context_broadcasting", spec=SPEC)
        torch.testing.assert_close(wrapped(IMAGES), network(IMAGES))
        assert not torch.allclose(wrapped(IMAGES), before)


def test_a_network_that_is_compiled_in_place_is_treated() -> None:
    torch.manual_seed(0)
    network, expected = OwnViT().eval(), OwnViT().eval()
    expected.load_state_dict(network.state_dict())
    network.compile(backend="eager")
    with torch.no_grad():
        network(IMAGES)
        treat(network, "context_broadcasting", spec=SPEC)
        torch.testing.assert_close(network(IMAGES), treat(expected, "context_broadcasting", spec=SPEC)(IMAGES))


def test_probes_in_a_loop_read_a_network_that_is_compiled_in_place() -> None:
    torch.manual_seed(0)
    network = OwnViT().eval()
    found = []
    for compiled_in_place in (False, True):
        if compiled_in_place:
            network.compile(backend="eager")
            network(IMAGES)
        with torch.no_grad(), ProbeCollection(network, ["norms", "attention_entropy"]) as probes:
            network(IMAGES)
            probes.update(torch.arange(2))
        found.append(probes.compute())
    for name, plain in found[0].items():
        other = found[1][name]
        assert other.status == plain.status == "ok", other.reason
        for scalar, value in plain.scalars.items():
            assert other.scalars[scalar].value == pytest.approx(value.value, rel=1e-5)
