"""Faults that somebody found by hand, each by its name and through the command line; more are drawn in test_fuzz."""

import json
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml

from tests.fuzz.holding import run_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs signals, limits and pipes of Linux")


@pytest.fixture
def place(world, tmp_path, monkeypatch):
    """The current folder: a fresh copy of the world."""
    copy = shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(copy)
    monkeypatch.setenv("VITCLINIC_CACHE", str(copy / "cache"))
    return copy


@pytest.fixture
def command(place, caplog):
    """Runs a command that keeps the promises; `err` of how it ended has warnings, too."""

    def run(*words):
        ended = run_command(words, place.parent)
        ended.err = " ".join(f"{ended.err} {caplog.text}".split())
        assert not ended.faults, ended.err
        return ended

    return run


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it-ran",)


def plant(place):
    array = np.array([Planted()], dtype=object)
    for run in ("run", "stopped"):
        np.savez(place / run / "trajectory.npz", step=array, epoch=array, projection=array)
        for file in (place / run).rglob("*.safetensors"):
            file.write_bytes(pickle.dumps(Planted()))
    for file in (place / "run" / "exams").rglob("*.npz"):
        np.savez(file, a=array)
    for file in (place / "cache").rglob("kept.npy"):
        np.save(file, array, allow_pickle=True)
    for file in (place / "cache" / "images").rglob("images.bin"):
        file.write_bytes(pickle.dumps(Planted()))
    (place / "plain.pt").write_bytes(pickle.dumps(Planted()))
    torch.save({"x": Planted()}, place / "saved.pt")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train", "--resume", "stopped"], 4),
        (["train", "recipe.yaml", "out=new"], 0),
        (["train", "recipe.yaml", "out=new", "init=plain.pt"], 2),
        (["train", "recipe.yaml", "out=new", "init=saved.pt"], 2),
        (["predict", "run", "photos"], 4),
        (["examine", "run", "--probes", "norms", "--device", "cpu"], 4),
        (["examine", "timm:resnet18@saved.pt", "--data", "photos", "--probes", "norms"], 2),
        (["report", "run", "--out", "page.html"], 0),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_planted_pickles_never_run(command, place, words, code):
    plant(place)
    assert command(*words).code == code
    assert not (place / "it-ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "stopped"],
        ["examine", "run", "--probes", "norms", "--device", "cpu"],
        ["report", "run", "--out", "page.html"],
    ],
    ids=lambda words: words[0],
)
def test_one_broken_byte_of_the_metrics_leaves_out_one_row(command, place, words):
    for run in ("stopped", "run"):
        file = place / run / "metrics.jsonl"
        content = bytearray(file.read_bytes())
        content[len(content) // 3] = 0xFF
        file.write_bytes(content)
    ended = command(*words)
    assert ended.code == 0
    assert "metrics.jsonl' has 1 damaged rows, which are left out" in ended.err


@pytest.mark.parametrize(
    "edit",
    [{"steps": None, "epochs": 3}, {"optimizer": {"lr": 1.0}}, {"seed": 7}, {"data": {"augment": "deit"}}],
    ids=lambda edit: " ".join(edit),
)
def test_an_edited_recipe_is_not_resumed(command, place, edit):
    file = place / "stopped" / "recipe.yaml"
    plain = yaml.safe_load(file.read_text())
    for key, value in edit.items():
        plain[key] = {**plain[key], **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump({key: value for key, value in plain.items() if value is not None}))
    ended = command("train", "--resume", "stopped")
    assert (ended.code, "recipe.yaml' was edited after the run started" in ended.err) == (4, True)


def test_random_weights_are_not_those_of_a_run(command, place):
    ended = command("examine", "run", "--random-weights", "--probes", "norms")
    assert (ended.code, "`random_weights` is for networks of libraries" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["examine", "run", "--data", "photos", "--device", "cpu"], 3, "pipe.png: not a readable image (it is not a"),
        (["corrupt", "photos", "--out", "copies"], 3, "leave it out by data.on_error=skip in a recipe"),
        (["predict", "run", "photos"], 8, "skipped photos/cat/pipe.png: it is not a regular file"),
        (["train", "recipe.yaml", "out=new"], 3, "pipe.png: not a readable image (it is not a regular file)"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else None,
)
def test_a_pipe_among_images_is_not_waited_for(command, place, words, code, message):
    os.mkfifo(place / "photos" / "cat" / "pipe.png")
    ended = command(*words)
    assert (ended.code, message in ended.err) == (code, True), ended.err


def test_a_changed_number_is_not_shown(command, place):
    (file,) = (place / "run" / "exams").rglob("norms-*.json")
    plain = json.loads(file.read_text())
    plain["scalars"]["weight_norm"]["value"] = 987654.0
    file.write_text(json.dumps(plain))
    ended = command("report", "run", "--out", "page.html")
    assert "was changed since it was written" in ended.err
    assert "987654" not in (place / "page.html").read_text() + ended.out


def test_a_typo_in_a_study_is_found_before_all_training(command, place):
    plain = yaml.safe_load((place / "study.yaml").read_text())
    plain["measures"]["norm"]["scalar"] = "weight_nrom"
    (place / "study.yaml").write_text(yaml.safe_dump(plain))
    ended = command("study", "study.yaml", "--out", "studied")
    assert (ended.code, "Did you mean 'weight_norm'" in ended.err) == (2, True)
    assert not (place / "studied").exists()


def test_a_run_without_checkpoints_says_that_it_starts_over(command, place):
    for name in ("last", "previous"):
        shutil.rmtree(place / "stopped" / "checkpoints" / name, ignore_errors=True)
    assert "starts over" in command("train", "--resume", "stopped").err


def test_a_loss_that_is_never_finite_is_no_finished_run(command, place):
    ended = command("train", "recipe.yaml", "out=new", "treatments=[{sam: {rho: 1e30}}]")
    assert ended.code == 5
    assert json.loads((place / "new" / "status.json").read_text())["status"] == "diverged"
