"""Projections of a run's weights: their error is what it is said to be, and a resumed run keeps the same rows."""

import numpy as np
import pytest
import torch
from torch import nn

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.training import Run, resume, train
from vitclinic.training.callbacks import FILE, projection, read_projections

DRAWS = 400


def vectors(angle, n=3000):
    """Two vectors of lengths 1 and 2 at this angle."""
    q, _ = torch.linalg.qr(torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return q[:, 0], 2 * (np.cos(angle) * q[:, 0] + np.sin(angle) * q[:, 1])


def projected(vector, size, seed):
    return projection([("a", vector[:1000]), ("b", vector[1000:])], size, seed)


@pytest.mark.parametrize("size", [50, 800])
@pytest.mark.parametrize("degrees", [10, 90, 150])
def test_lengths_and_angles_are_kept_to_the_stated_error(size, degrees):
    a, b = vectors(np.radians(degrees))
    pairs = [(projected(a, size, seed), projected(b, size, seed)) for seed in range(DRAWS)]
    lengths = np.array([np.linalg.norm(y) for y, _ in pairs])
    ratios = np.array([np.log(np.linalg.norm(z) / np.linalg.norm(y)) for y, z in pairs])
    angles = np.array([np.arccos(y @ z / np.linalg.norm(y) / np.linalg.norm(z)) for y, z in pairs])
    stated = np.sin(np.radians(degrees)) / np.sqrt(size)
    assert lengths.std() == pytest.approx(1 / np.sqrt(2 * size), rel=0.2)
    assert ratios.std() == pytest.approx(stated, rel=0.2)
    assert angles.std() == pytest.approx(stated, rel=0.2)
    assert lengths.mean() == pytest.approx(1, abs=1 / size + 4 * lengths.std() / np.sqrt(DRAWS))
    assert ratios.mean() == pytest.approx(np.log(2), abs=4 * stated / np.sqrt(DRAWS))


def test_a_projection_is_linear_and_does_not_depend_on_the_order_or_type_of_the_parameters():
    a, b = vectors(1.0)
    np.testing.assert_allclose(
        projected(a - 3 * b, 100, 5), projected(a, 100, 5) - 3 * projected(b, 100, 5), atol=1e-12
    )
    parts = [("x", a[:500].float()), ("y", b[:700].float())]
    np.testing.assert_allclose(projection(parts, 40, 0), projection(parts[::-1], 40, 0), atol=1e-12)
    assert not np.allclose(projected(a, 100, 5), projected(a, 100, 6))


def test_a_large_parameter_is_projected_piece_by_piece(monkeypatch):
    weights = nn.Parameter(torch.randn(64, 50, generator=torch.Generator().manual_seed(0)))
    whole = projection([("w", weights)], 30, 0)
    monkeypatch.setattr("vitclinic.training.callbacks._WEIGHTS", 7)
    pieces = projection([("w", weights)], 30, 0)
    np.testing.assert_allclose(pieces, whole, atol=1e-10)


def rows(run):
    return {step: (epoch, row.tolist()) for step, (epoch, row) in read_projections(run.path).items()}


class StopsAt(Callback):
    """Raises after a step, as a crash would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            raise RuntimeError("crash")


@pytest.mark.parametrize("crash", [3, 11])
def test_a_resumed_run_has_the_same_rows(tiny, tmp_path, crash):
    options = {"steps": 12, "ema": 0.9, "checkpoint": {"every": "4 steps"}, "logging": {"trajectory": 20}}
    whole = train(tiny(**options, out=str(tmp_path / "whole")))
    assert [(step, epoch) for step, (epoch, _) in rows(whole).items()] == [(0, 0.0), (5, 1.0), (10, 2.0), (12, 2.4)]
    with pytest.raises(RuntimeError, match="crash"):
        train(tiny(**options), callbacks=[StopsAt(crash)])
    run = Run(tmp_path / "run")
    assert rows(run) != rows(whole)
    assert rows(resume(run.path)) == rows(whole)


def test_the_rows_are_the_projections_of_the_checkpoints_parameters(tiny):
    run = train(tiny(steps=5, ema=0.9, checkpoint={"keep_epochs": [0, 1]}, logging={"trajectory": 20}, seed=4))
    model = run.checkpoints.read_model("epoch-1")
    parameters = [(name, value) for name, value in model.items() if name not in ("mean", "std")]
    np.testing.assert_array_equal(read_projections(run.path)[5][1], projection(parameters, 20, 4))


def test_rows_of_another_size_and_damaged_ones_are_sentences(tiny, tmp_path):
    with pytest.raises(RuntimeError, match="crash"):
        train(tiny(logging={"trajectory": 20}), callbacks=[StopsAt(4)])
    run = Run(tmp_path / "run")
    with pytest.raises(RecipeError, match="projections of size 20"):
        resume(run.path, {"logging.trajectory": 30})
    (run.path / FILE).write_bytes(b"PK nothing")
    with pytest.raises(RunError, match="cannot be read"):
        resume(run.path)
