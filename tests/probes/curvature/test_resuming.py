"""An interrupted measurement goes on where it was, to exactly the numbers of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.probes.curvature.networks import network
from tests.probes.curvature.test_sharpness import data
from vitclinic._core.records import Measurement
from vitclinic.probes import Subject, guards, measure, parse_probes

OPTIONS: dict[str, dict[str, Any]] = {
    "flatness": {"draws": 30, "precision": 0.02, "sigma": 0.05},
    "landscape": {"points": 5},
    "sharpness": {"trace_draws": 4, "density_draws": 2, "density_steps": 4},
    "hessian_spectrum": {"batches": 5, "batch": 4, "top": 2},
    "ntk": {"block": 2},
}
STEPS = {
    "flatness": [1, 7, 10],
    "landscape": [1, 11, 25],
    "sharpness": [1, 5, 12, 20, 27, 32],
    "hessian_spectrum": [1, 3, 5],
    "ntk": [1, 4, 6],
}
"""How often the progress is told before the end comes."""


class Interrupting:
    """Ends the measurement when it has been told of progress so often."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, what: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def measured(name: str, path: Path | None, after: int = 0) -> tuple[Measurement, int, int]:
    """The measurement, how often the network was asked, and how often progress was told."""
    net, interrupting = network("vit"), Interrupting(after)
    passes: list[None] = []
    net.register_forward_pre_hook(lambda *_: passes.append(None))
    scratch = {} if path is None else {name: path}
    subject = Subject(net, data(), batch_size=5, scratch=scratch, progress=interrupting)
    (found,) = measure(subject, parse_probes([{name: OPTIONS[name]}]))
    return found, len(passes), after - interrupting.left


@pytest.mark.parametrize(("name", "after"), [(name, after) for name, steps in STEPS.items() for after in steps])
def test_it_goes_on_exactly_where_it_was(name: str, after: int, tmp_path: Path) -> None:
    expected, passes, steps = measured(name, None)
    assert after <= steps
    path = tmp_path / "work.partial"
    with pytest.raises(KeyboardInterrupt):
        measured(name, path, after)
    assert path.is_file()
    found, fewer, _ = measured(name, path)
    assert found.status == expected.status == "ok"
    assert found.scalars == expected.scalars
    assert found.units == expected.units
    assert set(found.arrays) == set(expected.arrays)
    for key, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], array)
    if name != "sharpness":  # whose graph is kept, so that its products ask nothing of the network
        assert fewer < passes


def test_finished_eigenvalues_and_draws_are_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    _, _, steps = measured("sharpness", None)
    with pytest.raises(KeyboardInterrupt):
        measured("sharpness", path, steps - 1)
    assert measured("sharpness", path)[2] <= 4  # the steps of the last draw of the density


def test_interrupted_twice(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    expected, _, _ = measured("hessian_spectrum", None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measured("hessian_spectrum", path, 2)
    found, _, told = measured("hessian_spectrum", path)
    assert told == 1
    assert found.scalars == expected.scalars


@pytest.mark.parametrize("name", OPTIONS)
def test_files_are_written_once_in_a_while(name: str, tmp_path: Path) -> None:
    """While no time passes, at the end only."""
    with (
        mock.patch.object(guards, "write_bytes") as written,
        mock.patch.object(guards, "time", mock.Mock(monotonic=lambda: 7.0)),
    ):
        measured(name, tmp_path / "work.partial")
    assert written.call_count == 1


def test_draws_of_another_kind_of_device_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    guards.Partial(path, "cuda").write({"losses": np.array([5.0, 6.0])})
    found, _, _ = measured("flatness", path)
    assert torch.from_numpy(found.arrays["losses"]).max() < 5
