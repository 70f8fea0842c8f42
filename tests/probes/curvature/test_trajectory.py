"""Polar coordinates against closed forms, and of runs."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import vitclinic
from tests.probes.subjects import NETWORKS, subject
from tests.training.conftest import TINY
from vitclinic._core.callback import Callback
from vitclinic._core.errors import ModelError
from vitclinic.data import Augment
from vitclinic.probes import PastWeights, Training, Trajectory, measure
from vitclinic.probes.curvature.trajectory import mean_turn, polar_coordinates
from vitclinic.training import Run, train


def at(*numbers: float) -> dict[str, Tensor]:
    """Weights in two parameters of different shape."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return {"one": values[:1].view(1, 1), "two": values[1:]}


def test_a_straight_line_has_angle_zero_and_a_radius_that_falls() -> None:
    start, final = np.array([3.0, -1.0, 2.0]), np.array([1.0, 4.0, 0.5])
    shares = np.linspace(0, 1, 7)[:-1]
    polar = polar_coordinates(at(*start), at(*final), (at(*(start + s * (final - start))) for s in shares))
    np.testing.assert_allclose(polar.radius, 1 - shares, rtol=1e-12)
    np.testing.assert_allclose(polar.angle, 0, atol=1e-7)
    assert polar.distance == pytest.approx(np.linalg.norm(start - final))


def test_a_circle_around_the_end_has_radius_one_and_its_own_angle() -> None:
    angles = np.linspace(0, np.pi, 9)
    states = [at(5 + 2 * np.cos(t), -3.0, 1 + 2 * np.sin(t)) for t in angles]
    polar = polar_coordinates(states[0], at(5, -3, 1), states)
    np.testing.assert_allclose(polar.radius, 1, rtol=1e-12)
    np.testing.assert_allclose(polar.angle, angles, atol=1e-7)


def test_a_spiral_has_both() -> None:
    angles = np.linspace(0, 2, 9)
    states = [at(np.exp(-t) * np.cos(t), np.exp(-t) * np.sin(t), 7) for t in angles]
    polar = polar_coordinates(states[0], at(0, 0, 7), states)
    np.testing.assert_allclose(polar.radius, np.exp(-angles), rtol=1e-12)
    np.testing.assert_allclose(polar.angle, angles, atol=1e-7)


def test_a_straight_course_does_not_turn_a_polygon_by_its_angle_and_a_detour_by_its_corners() -> None:
    assert mean_turn(np.array([1.0, 0.7, 0.1]), np.zeros(3)) == pytest.approx(0)
    eighths = np.arange(8) * np.pi / 4
    corners = np.abs(np.angle(np.diff(np.append(np.exp(1j * eighths), 0))[-1] / np.diff(np.exp(1j * eighths))[-1]))
    assert mean_turn(np.ones(8), eighths) == pytest.approx((6 * np.pi / 4 + corners) / 7)
    there_and_back = mean_turn(np.array([1.0, 2.0, 1.0]), np.zeros(3))
    assert there_and_back == pytest.approx(np.pi / 2), "one turn back, one step straight on"


def test_the_end_itself_has_no_angle_and_weights_that_did_not_move_none_at_all() -> None:
    polar = polar_coordinates(at(1, 0), at(0, 0), [at(1, 0), at(0, 0)])
    assert polar.radius.tolist() == [1, 0]
    assert np.isnan(polar.angle).tolist() == [False, True]
    with pytest.raises(ModelError, match="final weights is 0"):
        polar_coordinates(at(1, 0), at(1, 0), [])
    with pytest.raises(ModelError, match="not finite"):
        polar_coordinates(at(1, 0), at(0, 0), [at(np.nan, 0)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs and a bit, with checkpoints of all epochs and a projection."""
    out = str(tmp_path_factory.mktemp("run") / "run")
    kept = {"checkpoint": {"keep_epochs": [0, 1, 2, 3]}, "logging": {"trajectory": 4000}}
    return train({**TINY, **kept, "steps": 17, "out": out})


def by_hand(run: Run) -> tuple[list[float], list[float]]:
    """Radius and angle of epochs 0 to 3 around the last checkpoint."""

    def flat(name: str) -> np.ndarray:
        model = run.checkpoints.read_model(name)
        return np.concatenate([model[key].double().numpy().ravel() for key in sorted(model) if "." in key])

    final, start = flat("last"), flat("epoch-0")
    radius, angle = [], []
    for epoch in range(4):
        here, there = flat(f"epoch-{epoch}") - final, start - final
        radius.append(np.linalg.norm(here) / np.linalg.norm(there))
        unit, other = here / np.linalg.norm(here), there / np.linalg.norm(there)
        angle.append(2 * np.arctan2(np.linalg.norm(unit - other), np.linalg.norm(unit + other)))
    return radius, angle


def test_a_run_by_its_checkpoints_and_by_its_projections(run: Run) -> None:
    exact = vitclinic.examine(run, probes=["trajectory"])["trajectory"]
    radius, angle = by_hand(run)
    assert exact.status == "ok"
    assert exact.arrays["epoch"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(exact.arrays["radius"], radius, rtol=1e-9)
    np.testing.assert_allclose(exact.arrays["angle"], angle, atol=1e-7)
    assert exact.scalars["projection_error"].value == 0
    assert exact.scalars["angle_max"].low is None
    rough = vitclinic.examine(run, probes=[{"trajectory": {"source": "projections"}}])["trajectory"]
    assert rough.scalars["projection_error"].value == pytest.approx(4000**-0.5)
    assert rough.arrays["epoch"].tolist() == [0, 1, 2, 3]
    for name in ("radius", "angle"):
        off = np.abs(rough.arrays[name] - exact.arrays[name])
        assert (off <= 3 * rough.arrays[f"{name}_error"] + 1e-6).all()
        assert off.max() > 1e-6
    distance = rough.scalars["distance"]
    assert distance.low < exact.scalars["distance"].value < distance.high


def test_the_same_run_at_another_checkpoint_has_the_same_course(run: Run, tmp_path: Path) -> None:
    found = [
        vitclinic.examine(f"{run.path}@{name}", probes=["trajectory"], out=tmp_path)["trajectory"]
        for name in ("epoch-1", "last")
    ]
    np.testing.assert_array_equal(found[0].arrays["angle"], found[1].arrays["angle"])


def test_a_run_that_goes_on_is_measured_again_and_is_not_converged_before(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_step(self, trainer) -> None:
            if trainer.step == 14:
                raise RuntimeError("crash")

    kept = {"checkpoint": {"keep_epochs": [0, 1, 2], "every": "6 steps"}, "steps": 17, "out": str(tmp_path / "run")}
    with pytest.raises(RuntimeError, match="crash"):
        train({**TINY, **kept}, callbacks=[Stops()])
    early = vitclinic.examine(tmp_path / "run", probes=["trajectory"])
    assert early["trajectory"].status == "not_converged"
    assert "not finished" in early["trajectory"].reason
    vitclinic.resume(tmp_path / "run")
    late = vitclinic.examine(tmp_path / "run", probes=["trajectory"])
    assert not late.reused
    assert late["trajectory"].status == "ok"
    assert late["trajectory"].scalars["points"].value == 3
    assert vitclinic.examine(tmp_path / "run", probes=["trajectory"]).reused


def test_without_kept_weights_it_says_what_to_set(tmp_path: Path) -> None:
    (found,) = measure(subject("vit"), [Trajectory()])
    assert found.status == "does_not_apply"
    assert "checkpoint.keep_epochs" in found.reason
    late = train({**TINY, "checkpoint": {"keep_epochs": [1]}, "out": str(tmp_path / "run")})
    found = vitclinic.examine(late, probes=["trajectory"])["trajectory"]
    assert found.status == "does_not_apply"
    assert "checkpoints lack epoch 0 and its projections are not kept: train with" in found.reason


def test_only_parameters_count_and_three_states_are_held_at_a_time() -> None:
    network = NETWORKS["unknown"]()
    initial = {name: value.detach().clone() for name, value in network.state_dict().items()}
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def read(epoch: int) -> dict[str, Tensor]:
        nonlocal most
        state = {name: value * (4.0 - epoch) for name, value in initial.items()}
        state["body.1.running_var"] = torch.full((6,), 100.0 * epoch**2)
        seen.append(weakref.ref(state["head.weight"]))
        most = max(most, sum(tensor() is not None for tensor in seen))
        return state

    past = PastWeights({float(e): partial(read, e) for e in range(5)}, dict, lambda: "digest", finished=True)
    patient = subject(network, training=Training(Augment(level="none"), 0.0, frozenset(), past))
    (found,) = measure(patient, [Trajectory()])
    assert found.status == "ok", found.reason
    np.testing.assert_allclose(found.arrays["radius"], [1, 0.75, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(found.arrays["angle"], 0, atol=1e-3)
    assert most == 3  # the first, the final and the present one
