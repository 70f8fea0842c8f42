"""Two real gloo processes against one: the same recipe, the same numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import free_port, run_ranks, start_ranks
from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.data import open_data
from vitclinic.training import Run, build_recipe, resume, train
from vitclinic.training.trainer import Trainer


def torchrun(arguments, processes=2, meeting=None):
    meeting = meeting or ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *meeting]
    command = [sys.executable, *launcher, "-m", "vitclinic", "train", *arguments]
    return subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def recipe(tiny, tmp_path, picture):
    """130 images: 13 for validation and 13 for test, which two processes cannot share evenly."""
    for name in ["a", "b"]:
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(65):
            picture(number + 100 * (name == "b"), (8, 8)).save(tmp_path / "set" / name / f"{number}.png")

    def make(**changes):
        plain = {"steps": 20, "data": {"source": str(tmp_path / "set"), "augment": "light"}, **changes}
        return tiny(**plain)

    return make


MUON = {
    "optimizer": {"name": "muon", "lr": 0.005},
    "treatments": [{"sam": {"start": 0.5, "every": 2, "m": 10}}],
}


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"precision": "fp64", "optimizer": {"name": "adamw", "lr": 1e-3}, "accumulate": 2}, 1e-10),
        ({"precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.05}}, 1e-6),
        ({**MUON, "precision": "fp64", "accumulate": 2, "clip": 0.5}, 1e-10),
        # timm resamples position embeddings, and their gradients, in float32.
        ({"precision": "fp64", "optimizer": {"name": "adamw", "lr": 1e-3}, "progressive_resizing": 0.5}, 1e-8),
    ],
    ids=["float64 AdamW", "float32 SGD", "float64 Muon and late LookSAM", "float64 progressive resizing"],
)
def test_two_processes_make_the_steps_of_one(recipe, tmp_path, changes, tolerance):
    alone = train(recipe(**changes, out=str(tmp_path / "alone")))
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(**changes, out=str(tmp_path / "both"))))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    both = Run(tmp_path / "both")
    theirs = both.checkpoints.read_model("last")
    for name, value in alone.checkpoints.read_model("last").items():
        assert (value - theirs[name]).abs().max() <= tolerance, name
    assert len(both.metrics) == len(alone.metrics)
    for ours, row in zip(alone.metrics, both.metrics, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=10 * tolerance)
        if row["kind"] in ("val", "test"):
            assert (row["correct"], row["count"]) == (ours["correct"], ours["count"])
            assert row["count"] == 13


def test_scores_of_two_processes_are_those_of_the_network_they_store(recipe, tmp_path):
    """BatchNorm and averaged weights: every process must score the same network."""
    from vitclinic.tasks import Classification
    from vitclinic.training import load_model

    model = {"name": "resnet18", "channels": [4, 4, 8, 8]}
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(model=model, ema=0.9, steps=12)))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    score = Classification().evaluate(load_model(run.path), open_data(run.recipe.data), "val", ALONE)
    assert score["correct"] == run.results["val"]["correct"]
    assert score["nll"] == pytest.approx(run.results["val"]["nll"], rel=1e-5)


@pytest.mark.slow
def test_an_error_is_one_sentence_also_from_many_processes(tmp_path):
    process = torchrun([f"data={tmp_path / 'nowhere'}"])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert output.count("error: There is no data") == 1
    assert "VitclinicError" not in output


def test_a_batch_that_does_not_divide(tiny):
    recipe = build_recipe(tiny(batch_size=41))
    with pytest.raises(RecipeError, match="batch_size 41 does not divide into 2 processes"):
        Trainer(recipe, open_data(recipe.data), 1, Distributed(1, 2), torch.device("cpu"))


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step_and_one_goes_on(recipe, tmp_path):
    whole = train(recipe(precision="fp64", steps=400, out=str(tmp_path / "whole")))
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(precision="fp64", steps=400, out=str(tmp_path / "stopped"))))
    process = torchrun(["-q", str(file)])
    run = Run(tmp_path / "stopped")
    while not (run.path / "checkpoints" / "last").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert run.status["status"] == "interrupted"
    assert resume(run.path).status["status"] == "finished"  # with another number of processes
    theirs = run.checkpoints.read_model("last")
    for name, value in whole.checkpoints.read_model("last").items():
        assert torch.allclose(value, theirs[name], atol=1e-8), name


@pytest.mark.slow
def test_two_nodes_make_the_steps_of_one_process(recipe, tmp_path):
    changes = {"precision": "fp64", "treatments": [{"sam": {"rho": 0.1, "m": 10}}], "clip": 0.5, "ema": 0.9}
    alone = train(recipe(**changes, out=str(tmp_path / "alone")))
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(**changes, out=str(tmp_path / "both"))))
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    meeting += ["--rdzv-id", "two-nodes", "--local-addr", "127.0.0.1"]
    agents = [torchrun(["-q", str(file)], 1, meeting) for _ in range(2)]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    theirs = Run(tmp_path / "both").checkpoints.read_model("last")
    for name, value in alone.checkpoints.read_model("last").items():
        assert (value - theirs[name]).abs().max() <= 1e-10, name
    assert json.loads((tmp_path / "both" / "environment.json").read_text())["processes"] == 2


def children(pid):
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
def test_processes_end_and_save_when_their_agent_is_killed(recipe, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(steps=100_000)))
    process = torchrun(["-q", str(file)])
    run = Run(tmp_path / "run")
    while not (run.path / "checkpoints" / "last").exists() and process.poll() is None:
        time.sleep(0.05)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert run.status["status"] == "interrupted"
    assert run.checkpoints.read("last")[1]["step"] == run.status["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_is_one_sentence_and_the_run_goes_on(recipe, tmp_path, lost):
    file = tmp_path / "recipe.yaml"
    file.write_text(build_recipe(recipe(steps=600, checkpoint="10 steps")).model_dump_json())
    out = tmp_path / "run"
    ranks = start_ranks("train", str(file), "-q")
    while not (out / "metrics.jsonl").exists() or len(Run.open(out).metrics) < 25:
        assert ranks[0].poll() is None
        time.sleep(0.05)
    ranks[lost].kill()
    _, said = ranks[1 - lost].communicate(timeout=60)
    ranks[lost].wait(timeout=60)
    assert ranks[1 - lost].returncode == RunError.exit_code
    assert "Traceback" not in said
    if lost == 1:  # only the leading process speaks
        assert said.count("One of the 2 processes is gone") == 1
        assert f"--resume {out}" in " ".join(said.split())
    status = Run.open(out).status
    assert status["status"] == "interrupted"
    assert "another process was lost" in status["reason"]
    assert Run.open(out).checkpoints.read("last")[1]["step"] >= 10
    assert resume(out).status["status"] == "finished"
