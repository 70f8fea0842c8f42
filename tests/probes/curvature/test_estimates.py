"""What a curvature probe says that it will cost, against what it does cost; and that it tells of its progress."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.probes.subjects import subject
from vitclinic.exam.timing import Pace
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.cost import flops

OPTIONS: dict[str, dict[str, Any]] = {
    "flatness": {"draws": 12, "precision": 0.0},
    "landscape": {"points": 5},
    "landscape of eigenvectors": {"points": 3, "directions": "eigenvectors"},
    "sharpness": {},
    "sharpness of the whole": {"components": False},
    "hessian_spectrum": {"batches": 2},
    "ntk": {"block": 11},
}


def patient(network: str | nn.Module = "vit", **options: Any) -> Subject:
    return subject(network, batch_size=64, **options)


@pytest.mark.parametrize("what", OPTIONS)
def test_the_estimate_is_about_what_the_arithmetic_comes_to(what: str) -> None:
    (probe,) = parse_probes([{what.split()[0]: OPTIONS[what]}])
    examined = patient()
    examined.network.eval()
    one = flops(examined, examined.example)
    with FlopCounterMode(display=False) as counter:
        (found,) = measure(examined, [probe])
    assert found.status == "ok", found.reason
    assert 1 / 3 < counter.get_total_flops() / one / probe.forwards(probe.view(examined)) < 3


@pytest.mark.parametrize("name", ["flatness", "landscape", "sharpness", "hessian_spectrum", "ntk"])
def test_the_estimate_is_no_more_than_the_budget(name: str) -> None:
    (probe,) = parse_probes([{name: {"budget": 0.001}}])
    assert Pace(patient()).of(probe) == pytest.approx(0.001)


@pytest.mark.parametrize("what", OPTIONS)
def test_progress_grows_to_its_end(what: str) -> None:
    told: list[tuple[int, int]] = []
    examined = patient(progress=lambda _, done, total: told.append((done, total)))
    measure(examined, parse_probes([{what.split()[0]: OPTIONS[what]}]))
    assert len(told) > 1
    assert told == sorted(told)
    assert all(0 < done <= total for done, total in told)
    if not what.startswith("sharpness"):  # how many products it takes is not known before
        assert told[-1][0] == told[-1][1]
