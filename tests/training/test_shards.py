"""Training on shards: the same weights with any number of workers and processes, and after `kill -9` inside a shard."""

import json
import signal

import pytest
import torch

from tests.data.shard_files import served, write_tars
from tests.rows import drop_timing
from tests.training.test_distributed import torchrun
from tests.training.test_resume import start, wait_for_step
from vitclinic.training import Run, train

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    """Windows of two shards with 21 to 23 images, and steps of 20: most checkpoints are inside a shard."""
    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "cache"))
    write_tars(tmp_path / "tars", shards=7)
    with served(tmp_path / "tars") as address:
        data = {"source": f"{address}/train-{{000..006}}.tar", "window": 2, "augment": {"level": "light", "mixup": 0.5}}
        common = {"data": data, "precision": "fp64", "steps": 12, "batch_size": 20, "checkpoint": {"every": "2 steps"}}
        yield lambda **changes: tiny(**common, **changes)


def test_any_number_of_workers_and_processes_trains_the_same_weights(recipe, tmp_path):
    both = {}
    for workers in (1, 2, 4):
        file = tmp_path / f"both-{workers}.yaml"
        file.write_text(json.dumps(recipe(out=str(tmp_path / f"both-{workers}"), workers=workers)))
        both[workers] = torchrun(["-q", str(file)])
    runs = [train(recipe(out=str(tmp_path / str(workers)), workers=workers)) for workers in (0, 1, 2, 4)]
    first = runs[0].checkpoints.read_model("last")
    for run in runs[1:]:
        assert drop_timing(run.metrics) == drop_timing(runs[0].metrics)
        assert all(torch.equal(value, first[name]) for name, value in run.checkpoints.read_model("last").items())
    for workers, process in both.items():
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        theirs = Run(tmp_path / f"both-{workers}").checkpoints.read_model("last")
        assert theirs.keys() == first.keys()
        for name, value in theirs.items():
            assert (value - first[name]).abs().max() <= 1e-10, (workers, name)


def test_killed_inside_a_shard_it_resumes_to_the_same_bits(recipe, tmp_path):
    whole = train(recipe(out=str(tmp_path / "whole"), workers=2))
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(out=str(tmp_path / "killed"), workers=1)))
    run = Run(tmp_path / "killed")
    process = start([str(file)])
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = start(["--resume", str(run.path)])
    assert process.wait(timeout=300) == 0
    assert drop_timing(run.metrics) == drop_timing(whole.metrics)
    ours, theirs = whole.checkpoints.read("last"), run.checkpoints.read("last")
    assert all(torch.equal(value, theirs[0][name]) for name, value in ours[0].items())
    for index, entry in ours[1]["optimizer"]["state"].items():
        assert all(torch.equal(value, theirs[1]["optimizer"]["state"][index][key]) for key, value in entry.items())
