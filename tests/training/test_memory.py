"""Too little memory for a batch: the same batch in more parts, the same run."""

import pytest
import torch

from tests.rows import drop_timing
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import ModelError
from vitclinic.data import open_data
from vitclinic.training import build_recipe, resume, train
from vitclinic.training.passes import Passes
from vitclinic.training.trainer import Trainer

from .conftest import TINY
from .test_damage import Stop

BATCHNORM = {"name": "resnet18", "channels": [4, 4, 8, 8]}


@pytest.fixture
def small(monkeypatch):
    """Let no more than so many images into memory; the want shows in the middle of a pass."""

    def make(images):
        whole = Passes.__call__

        def pass_or_fail(self, batch, sync=True, weight=1.0):
            losses = whole(self, batch, sync, weight)
            if len(batch) > images:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return losses

        monkeypatch.setattr(Passes, "__call__", pass_or_fail)

    return make


def same(one, other):
    ours, theirs = one.checkpoints.read_model("last"), other.checkpoints.read_model("last")
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    "changes", [{}, {"model": BATCHNORM}, {"treatments": [{"sam": {"rho": 0.1}}], "ema": 0.9, "clip": 0.5}], ids=str
)
def test_a_run_goes_on_with_half_the_images_at_a_time(tiny, tmp_path, small, caplog, changes):
    planned = train(tiny(**changes, accumulate=4, out=str(tmp_path / "planned")))
    small(10)
    halved = train(tiny(**changes, out=str(tmp_path / "halved")))
    assert same(planned, halved)
    assert drop_timing(planned.metrics) == drop_timing(halved.metrics)
    assert halved.recipe.accumulate == 1
    said = [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]
    assert said == [
        "Out of memory with 40 images at a time: going on with 20 (accumulate=2), in batches of 40 as before.",
        "Out of memory with 20 images at a time: going on with 10 (accumulate=4), in batches of 40 as before.",
    ]


def test_a_resumed_run_goes_on_as_it_was_divided(tiny, tmp_path, small, monkeypatch):
    every = {"checkpoint": {"every": "1 steps"}}
    planned = train(tiny(**every, accumulate=2, out=str(tmp_path / "planned")))
    small(20)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(**every, out=str(tmp_path / "halved")), callbacks=[Stop(4)])
    monkeypatch.undo()  # more memory now: nothing but the checkpoint says how the run was divided
    assert same(planned, resume(tmp_path / "halved"))


def test_one_image_is_the_end(tiny, small):
    small(0)
    with pytest.raises(ModelError, match="Out of memory with 5 images at a time: choose a smaller network"):
        train(tiny())


def test_processes_do_not_divide_by_themselves(small):
    recipe = build_recipe(TINY)
    trainer = Trainer(recipe, open_data(recipe.data), 1, Distributed(), torch.device("cpu"))
    trainer.distributed = Distributed(0, 2)
    small(1)
    with pytest.raises(ModelError, match="or a larger accumulate"):
        trainer.advance()


def test_other_errors_are_not_taken_for_it(tiny, monkeypatch):
    def fail(self, batch, sync=True, weight=1.0):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Passes, "__call__", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(tiny())
