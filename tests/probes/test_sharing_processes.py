"""Streaming probes in two real processes, each of which passes its share of the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.probes.subjects import subject
from tests.processes import in_two_processes
from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.records import Scalar
from vitclinic.probes import Probe, Result, StreamingProbe, Tally, known_probes
from vitclinic.probes.shared_pass import Outcome, run_shared_pass
from vitclinic.probes.subject import Subject

IMAGES = 32  # two shares of two batches, so that the mini-batches of CKA are those of one process
STREAMING = sorted(
    name
    for name, probe in known_probes().items()
    if issubclass(probe, StreamingProbe) and probe.__module__.startswith("vitclinic.")
)


def vit(distributed: Distributed) -> Subject:
    found = subject("vit", count=IMAGES, distributed=distributed)
    found.network.double().eval()
    return found


def probes() -> dict[str, Probe]:
    return {name: known_probes()[name]() for name in STREAMING}


class Firsts(StreamingProbe):
    """The indices it saw: nothing that could be put together."""

    name = "firsts"

    def begin(self, subject: Subject) -> Tally:
        return _Firsts()


class _Firsts(Tally):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def end_batch(self, batch, logits) -> None:
        self.seen += batch.indices.tolist()

    def finish(self) -> Result:
        return Result({"seen": Scalar(value=float(len(self.seen)))})


class Fails(Firsts):
    """Fails in the second process alone, at its last images."""

    name = "fails"

    def begin(self, subject: Subject) -> Tally:
        return _Fails()


class _Fails(_Firsts):
    def sums(self) -> dict[str, Any]:
        return {}

    def end_batch(self, batch, logits) -> None:
        if IMAGES - 1 in batch.indices.tolist():
            raise ValueError("the last image is too much")


def _numbers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Names stay texts."""
    return array if array.dtype.kind == "U" else array.astype(float)


def plain(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Exception):
        return {"error": f"{type(outcome).__name__}: {outcome}"}
    rows = {f"{row.name} {name}": scalar for row in outcome.units for name, scalar in row.values.items()}
    scalars = {**outcome.scalars, **rows}
    ends = {f"{name} {end}": getattr(scalar, end) for name, scalar in scalars.items() for end in ("value", "low", "n")}
    return {
        **{name: end for name, end in ends.items() if end is not None},
        **{name: _numbers(array).ravel().tolist() for name, array in outcome.arrays.items()},
    }


def both(rank: int) -> dict[str, Any]:
    together = Distributed.current()
    found = run_shared_pass(vit(together), probes())
    passed: list[int] = []
    watched = vit(together)
    watched.progress = lambda what, done, total: passed.append(done)
    mixed = run_shared_pass(watched, {"firsts": Firsts(), "norms": known_probes()["norms"]()})
    failing = run_shared_pass(vit(together), {"fails": Fails(), "norms": known_probes()["norms"]()})
    return {
        "streaming": {name: plain(outcome) for name, outcome in found.items()},
        "firsts": plain(mixed["firsts"])["seen value"],
        "passed": passed,
        "failing": {name: plain(outcome) for name, outcome in failing.items()},
    }


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("shares")
    return in_two_processes(both, folder)


@pytest.mark.parametrize("name", STREAMING)
def test_two_processes_find_what_one_finds(shares, name):
    (alone,) = [plain(outcome) for outcome in run_shared_pass(vit(ALONE), {name: known_probes()[name]()}).values()]
    first, second = (share["streaming"][name] for share in shares)
    assert first.keys() == alone.keys()
    for key, value in alone.items():
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
            assert first[key] == second[key] == value, key
            continue
        assert first[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key
        assert second[key] == pytest.approx(first[key], nan_ok=True), key


def test_every_streaming_probe_can_be_divided():
    found = vit(ALONE)
    assert [name for name, probe in probes().items() if probe.begin(found).sums() is None] == []


def test_a_tally_without_sums_sees_all_images_in_each_process(shares):
    assert [share["firsts"] for share in shares] == [IMAGES, IMAGES]
    assert [share["passed"][-1] for share in shares] == [IMAGES, IMAGES]


def test_a_probe_that_fails_in_one_process_has_failed_and_the_others_have_not(shares):
    for share in shares:
        assert share["failing"]["fails"] == {"error": "ValueError: the last image is too much"}
        assert share["failing"]["norms"]["weight_norm value"] > 0
