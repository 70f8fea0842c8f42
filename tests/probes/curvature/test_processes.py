"""Two real gloo processes that measure one network together, each on its share of the images, against one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.probes.curvature.networks import batches, hurried, network
from tests.probes.curvature.test_sharpness import data
from tests.processes import in_two_processes
from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import ModelError
from vitclinic._core.records import Measurement
from vitclinic.data import Batch
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface

SHARES = {"halves": [(5, 2), (6,)], "nothing": [(5, 5, 3), ()]}
"""The sizes of each process's batches, of 13 images in all."""

PROBES: dict[str, dict[str, Any]] = {
    "flatness": {"draws": 12, "sigma": 0.1, "precision": 0.0},
    "landscape": {"points": 3, "directions": "eigenvectors"},
    "sharpness": {"tolerance": 1e-6, "trace_draws": 3, "density_steps": 5},
    "hessian_spectrum": {"batches": 5, "batch": 4, "top": 2, "tolerance": 1e-8},
    "ntk": {"block": 3},
}


def share(sizes: list[tuple[int, ...]], rank: int) -> list[Batch]:
    """Those images that are a process's, in batches of its own."""
    (whole,) = batches((13,))
    start = sum(sum(sizes[other]) for other in range(rank))
    cut = []
    for size in sizes[rank]:
        part = slice(start, start + size)
        cut.append(Batch(whole.images[part], whole.targets[part], whole.indices[part], whole.keys[part]))
        start += size
    return cut


def numbers(data: list[Batch], distributed: Distributed) -> dict[str, Tensor]:
    """Everything that is a sum over images."""
    surface = LossSurface(network("vit"), data, decay=0.1, distributed=distributed)
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with surface.gradient_mode():
        hessian = Hessian(surface)
        product, size = hessian.block(["head.weight", "blocks.0.mlp.fc1.weight"])
        found = largest_eigenpairs(hessian.product, vector, 3, tolerance=1e-12)
        return {
            "images": torch.tensor(surface.images),
            "checked loss": torch.tensor(surface.check(), dtype=torch.float64),
            "gradient": surface.gradient(),
            "product": hessian.product(vector),
            "recomputed": Hessian(surface, memory=0).product(vector),
            "block": product(vector[:size]),
            "eigenvalues": torch.from_numpy(found.values),
        }


class Frail(nn.Module):
    """Cannot do its `fails`-th pass, or takes only so many images at a time."""

    def __init__(self, fails: int = 0, most: int = 100) -> None:
        super().__init__()
        self.inner = network("mlp")
        self.left, self.most = fails, most

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("a bad day")
        if len(x) > self.most:
            raise MemoryError
        return self.inner(x)


def patient(distributed: Distributed, net: nn.Module | None = None, **options: Any) -> Subject:
    return Subject(net or network("vit"), data(), batch_size=4, distributed=distributed, **options)


def exam(subject: Subject, **options: Any) -> Measurement:
    (found,) = measure(subject, parse_probes([options]))
    return found


def plain(found: Measurement) -> dict[str, Any]:
    """What a measurement says, as a process can hand it on."""
    values = {name: scalar.value for name, scalar in found.scalars.items()}
    values |= {row.name: row.values["lambda_max"].value for row in found.units}
    arrays = {name: torch.from_numpy(array.copy()) for name, array in found.arrays.items()}
    return {"status": found.status, "reason": found.reason, "values": values, "arrays": arrays}


def interrupt(what: str, done: int, total: int) -> None:
    raise KeyboardInterrupt


def together(rank: int, folder: str) -> dict[str, Any]:
    """All that needs two processes, in one start of them."""
    both = Distributed.current()
    found: dict[str, Any] = {name: numbers(share(sizes, rank), both) for name, sizes in SHARES.items()}
    for name, options in PROBES.items():
        found[name] = plain(exam(patient(both), **{name: options}))
        with hurried(1 if rank == 1 else 10**9):
            found[f"{name} in a hurry"] = plain(exam(patient(both), **{name: {**options, "budget": "10m"}}))
        frail = Frail(fails={"hessian_spectrum": 4, "ntk": 2}.get(name, 9) if rank == 1 else 0)
        found[f"{name} broken"] = plain(exam(patient(both, frail), **{name: options}))
    found["tight"] = plain(exam(tight := patient(both, Frail(most=3 if rank == 1 else 100)), flatness={"draws": 2}))
    found["batch size"] = tight.on("train", 256).batch_size
    other = network("mlp")
    with torch.no_grad():
        other[1].bias.add_(rank)
    found["other weights"] = plain(exam(patient(both, other), flatness={}))
    for name, options in PROBES.items():
        scratch = {name: Path(folder) / str(rank) / name}  # on machines that do not share their disks
        with suppress(KeyboardInterrupt):
            exam(patient(both, scratch=scratch, progress=interrupt), **{name: options})
        assert scratch[name].is_file() == both.is_leader
        found[f"{name} resumed"] = plain(exam(patient(both, scratch=scratch), **{name: options}))
    if rank == 1:
        found["alone"] = plain(exam(patient(ALONE), flatness=PROBES["flatness"]))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two_processes(together, tmp_path_factory.mktemp("processes"), str(tmp_path_factory.mktemp("scratch")))


@pytest.mark.parametrize("shares", SHARES)
def test_sums_are_over_the_images_of_both_and_the_same_in_both(found: list[dict[str, Any]], shares: str) -> None:
    expected = numbers(batches((13,)), ALONE)
    for name, value in expected.items():
        torch.testing.assert_close(found[0][shares][name], value, rtol=1e-8, atol=1e-10)
        assert torch.equal(found[0][shares][name], found[1][shares][name]), name


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_in_two_processes_finds_what_it_finds_in_one(found: list[dict[str, Any]], name: str) -> None:
    expected = plain(exam(patient(ALONE), **{name: PROBES[name]}))
    assert found[0][name]["status"] == expected["status"] == "ok"
    assert found[0][name]["values"] == found[1][name]["values"]
    assert found[0][name]["values"] == pytest.approx(expected["values"], rel=1e-6)
    for key, array in expected["arrays"].items():
        torch.testing.assert_close(found[0][name]["arrays"][key], array, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PROBES)
def test_both_go_on_from_what_the_leading_one_has_kept(found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        assert each[f"{name} resumed"]["values"] == each[name]["values"]
        assert each[f"{name} resumed"]["reason"] is None


@pytest.mark.parametrize("name", PROBES)
def test_both_stop_when_the_clock_of_one_has_run_out(found: list[dict[str, Any]], name: str) -> None:
    one, other = (each[f"{name} in a hurry"] for each in found)
    assert one["status"] == "not_converged"
    assert one["reason"] == other["reason"]
    assert one["values"] == other["values"]


@pytest.mark.parametrize("name", PROBES)
def test_a_failure_of_one_is_that_of_both(found: list[dict[str, Any]], name: str) -> None:
    for each in found:
        assert each[f"{name} broken"]["status"] == "failed"
        assert each[f"{name} broken"]["reason"] == "ArithmeticError: a bad day"


def test_memory_that_is_short_in_one_halves_the_batch_of_both(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["tight"]["status"] == "not_converged"
        assert each["batch size"] == 2


def test_different_weights_are_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["other weights"]["status"] == "failed"
        assert "have different weights" in each["other weights"]["reason"]


def test_one_process_of_a_group_may_measure_by_itself(found: list[dict[str, Any]]) -> None:
    assert found[1]["alone"]["values"] == plain(exam(patient(ALONE), flatness=PROBES["flatness"]))["values"]


def test_an_error_that_cannot_be_sent_is_sent_as_its_text() -> None:
    from vitclinic._core.distributed import portable

    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    sent = portable(OddError(1, 2))
    assert isinstance(sent, ModelError)
    assert str(sent) == "OddError: 1 and 2"
