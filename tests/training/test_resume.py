"""`kill -9`, then resume: the same bits as without."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.processes import Command, run_command
from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic.training import Run, resume, train

HARD = {
    "data": {"source": "digits", "limit": 200, "augment": "deit"},
    "steps": 60,
    "accumulate": 2,
    "ema": 0.9,
    "checkpoint": {"every": "7 steps", "keep_epochs": [3]},
    "workers": 1,
}


def start(arguments):
    """In a process group of its own, as a terminal would: signals then reach its workers, too."""
    return Command(["train", "-q", *arguments])


def wait_for_step(run, step, process):
    """Until the metrics show `step`, or the process ends."""
    file = run.path / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.005)


def same(first, second):
    assert drop_timing(first.metrics) == drop_timing(second.metrics)
    assert first.results == second.results
    for name in ("last", "best", "epoch-3"):
        a, b = first.checkpoints.read(name), second.checkpoints.read(name)
        assert all(torch.equal(value, b[0][key]) for key, value in a[0].items()), name
        assert all(torch.equal(value, b[1]["raw_network"][key]) for key, value in a[1]["raw_network"].items()), name
        for index, entry in a[1]["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, b[1]["optimizer"]["state"][index][key]), (name, index, key)


@pytest.fixture
def whole(tiny, tmp_path):
    return train(tiny(**HARD, out=str(tmp_path / "whole")))


def killed_and_resumed(tiny, tmp_path, steps, hard=HARD):
    """A run in a process of its own, killed at each of `steps`, resumed each time."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny(**hard, out=str(tmp_path / "killed"))))
    run = Run(tmp_path / "killed")
    process = start([str(recipe)])
    for step in steps:
        wait_for_step(run, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start(["--resume", str(run.path)])
    assert process.wait(timeout=120) == 0
    return run


def test_killed_once(tiny, tmp_path, whole):
    same(whole, killed_and_resumed(tiny, tmp_path, [random.Random(time.time()).randint(8, 55)]))


def test_muon_and_late_looksam_killed_after_sam_has_started(tiny, tmp_path):
    hard = {**HARD, "optimizer": {"name": "muon", "lr": 0.005}, "treatments": [{"sam": {"start": 0.4, "every": 4}}]}
    whole = train(tiny(**hard, out=str(tmp_path / "whole")))
    killed = killed_and_resumed(tiny, tmp_path, [random.Random(time.time()).randint(25, 55)], hard)
    same(whole, killed)
    one, other = (run.checkpoints.read("last")[1]["rule"] for run in (whole, killed))
    assert one["steps"] == other["steps"] == 36
    assert all(torch.equal(a, b) for a, b in zip(one["direction"], other["direction"], strict=True))


@pytest.mark.slow
def test_killed_ten_times(tiny, tmp_path, whole):
    steps = sorted(random.Random(time.time()).sample(range(1, 59), 10))
    same(whole, killed_and_resumed(tiny, tmp_path, steps))


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_starts_again(tiny, tmp_path, whole):
    same(whole, killed_and_resumed(tiny, tmp_path, [2]))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_runs_save_first_and_resume_to_the_same_numbers(tiny, tmp_path, whole, number, code):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny(**HARD, out=str(tmp_path / "stopped"))))
    run = Run(tmp_path / "stopped")
    process = start([str(recipe)])
    wait_for_step(run, 20, process)
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == code
    assert run.status["status"] == "interrupted"
    saved = run.checkpoints.read("last")[1]["step"]
    assert saved == run.status["step"] >= 20
    process = start(["--resume", str(run.path)])
    assert process.wait(timeout=120) == 0
    same(whole, run)


def test_a_damaged_last_checkpoint_resumes_from_the_previous_one_to_the_same_bits(tiny, tmp_path, whole):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny(**HARD, out=str(tmp_path / "damaged"))))
    run = Run(tmp_path / "damaged")
    process = start([str(recipe)])
    wait_for_step(run, 30, process)
    process.kill()
    process.wait()
    state = run.path / "checkpoints" / "last" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    assert "damaged" in run_command("train", "--resume", str(run.path)).stderr
    same(whole, run)


def test_cut_off_between_the_last_checkpoint_and_the_test(tiny, tmp_path, whole):
    class Stop(Callback):
        def on_row(self, row):
            if row["kind"] == "test":
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        train(tiny(**HARD, out=str(tmp_path / "late")), callbacks=[Stop()])
    same(whole, resume(tmp_path / "late"))


def test_cut_off_before_last_keeps_what_the_epoch_asked_for(tiny, tmp_path, whole, monkeypatch):
    from vitclinic.training import checkpoint

    real = checkpoint.publish

    def dying(staging, target, retired):
        if target.name == "last" and (target.parent / "epoch-3").exists():
            raise RuntimeError("power cut")
        real(staging, target, retired)

    monkeypatch.setattr(checkpoint, "publish", dying)
    with pytest.raises(RuntimeError):
        train(tiny(**HARD, out=str(tmp_path / "cut")))
    monkeypatch.undo()
    same(whole, resume(tmp_path / "cut"))


def test_metrics_cut_off_in_the_middle_of_a_line(tmp_path):
    from vitclinic.training.rows import cut_back, read_rows

    file = Path(tmp_path / "metrics.jsonl")
    file.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "tra')
    assert [row["step"] for row in read_rows(file)] == [1, 2]
    cut_back(file, 1)
    assert file.read_text() == '{"kind": "train", "step": 1}\n'
