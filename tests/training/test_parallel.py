"""`parallel=fsdp`: two real gloo processes that divide the weights, against one process and against two copies."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processes import run_ranks, start_ranks
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import RecipeError
from vitclinic.data import ImageSpec, open_data
from vitclinic.models import create_model
from vitclinic.training import Run, build_recipe, load_model, resume, train
from vitclinic.training.parallel import find_blocks, refuse_indivisible
from vitclinic.training.trainer import Trainer

EVERYTHING = {
    "treatments": [{"sam": {"rho": 0.1, "m": 10}}],
    "clip": 0.5,
    "ema": 0.9,
    "accumulate": 2,
}


@pytest.fixture
def recipe(tiny):
    def make(**changes):
        model = {**tiny()["model"], "depth": 2}
        plain = {"model": model, "precision": "fp64", "optimizer": {"name": "adamw", "lr": 1e-3}, "steps": 6}
        return tiny(**{**plain, **changes})

    return make


def train_on_two(recipe, folder, words=()):
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    done = run_ranks("train", "-q", str(file), *words)
    assert done.returncode == 0, done.stderr
    return Run(Path(recipe["out"]))


def tensors(value, path=""):
    """Yield all tensors of a nested state with their places."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from tensors(item, f"{path}/{key}")


def difference(ours, theirs):
    """Return the largest difference between the weights of two runs' last checkpoints, which name the same tensors."""
    (model, state), (other, other_state) = ours.checkpoints.read("last"), theirs.checkpoints.read("last")
    pairs = [(dict(tensors(model)), dict(tensors(other)))]
    assert dict(tensors(state)).keys() == dict(tensors(other_state)).keys()
    assert {k: v.shape for k, v in tensors(state)} == {k: v.shape for k, v in tensors(other_state)}
    if state["raw_network"] is not None:
        pairs.append((state["raw_network"], other_state["raw_network"]))
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)


def same_bits(ours, theirs):
    """Tell whether two runs' last checkpoints and all losses are the same."""
    first, second = (dict(tensors(list(run.checkpoints.read("last")))) for run in (ours, theirs))
    losses = [[row["loss"] for row in run.metrics] for run in (ours, theirs)]
    equal = all(torch.equal(value, second[name]) for name, value in first.items())
    return first.keys() == second.keys() and losses[0] == losses[1] and equal


def test_divided_weights_make_the_steps_of_one_process(recipe, tmp_path):
    changes = {**EVERYTHING, "steps": 3}
    alone = train(recipe(**changes, out=str(tmp_path / "alone")))
    both = train_on_two(recipe(**changes, parallel="fsdp", out=str(tmp_path / "both")), tmp_path)
    assert difference(alone, both) <= 1e-10
    for ours, row in zip(alone.metrics, both.metrics, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=1e-9)
        if row["kind"] == "train":
            assert row["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-9)
        else:
            assert (row["correct"], row["count"]) == (ours["correct"], ours["count"])
    assert load_model(both.path)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"treatments": [{"sam": {"m": 10, "adaptive": True, "rho": 0.5}}], "optimizer": {"name": "sgd", "lr": 0.05}},
        {"treatments": [{"sam": {"start": 0.25, "every": 2, "m": 10}}], "optimizer": {"name": "muon", "lr": 5e-3}},
        {"freeze": ["stem"], "layer_decay": 0.7, "optimizer": {"name": "rmsprop", "lr": 5e-4}},
        {"treatments": ["adversarial", {"sam": {"m": 20}}]},
        {"treatments": ["patch_diversity"], "progressive_resizing": 0.5},
    ],
    ids=["AdamW, accumulate", "ASAM, SGD", "late LookSAM, Muon", "frozen, RMSprop", "adversarial", "objectives"],
)
def test_divided_weights_make_the_steps_of_copies(recipe, tmp_path, changes):
    copies = train_on_two(recipe(**changes, out=str(tmp_path / "copies")), tmp_path)
    parts = train_on_two(recipe(**changes, parallel="fsdp", out=str(tmp_path / "parts")), tmp_path)
    assert difference(copies, parts) <= (1e-8 if "progressive_resizing" in changes else 1e-10)


@pytest.mark.slow
def test_an_ascent_without_m_is_that_of_all_processes(recipe, tmp_path):
    changes = {"treatments": [{"sam": {"rho": 0.3}}], "accumulate": 2}
    alone = train(recipe(**changes, out=str(tmp_path / "alone")))
    both = train_on_two(recipe(**changes, parallel="fsdp", out=str(tmp_path / "both")), tmp_path)
    assert difference(alone, both) <= 1e-10
    assert both.checkpoints.read("last")[1]["rule"]["images"] == 20


@pytest.mark.slow
def test_running_statistics_and_rounding(recipe, tmp_path):
    """BatchNorm sees a process's own images, and the leading one's statistics are stored, as with copies."""
    changes = {"model": {"name": "resnet18", "channels": [4, 4, 8, 8]}, "ema": 0.9}
    copies = train_on_two(recipe(**changes, out=str(tmp_path / "copies")), tmp_path)
    parts = train_on_two(recipe(**changes, parallel="fsdp", out=str(tmp_path / "parts")), tmp_path)
    assert difference(copies, parts) <= 1e-10
    assert parts.results["val"] == pytest.approx(copies.results["val"], rel=1e-12)


@pytest.mark.slow
def test_half_precision_learns_as_copies_do(recipe, tmp_path):
    copies = train_on_two(recipe(precision="bf16", out=str(tmp_path / "copies")), tmp_path)
    parts = train_on_two(recipe(precision="bf16", parallel="fsdp", out=str(tmp_path / "parts")), tmp_path)
    for ours, row in zip(copies.metrics, parts.metrics, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_goes_on_with_the_same_bits(recipe, tmp_path, by):
    sam = [{"sam": {"m": 20, "every": 2}}]
    changes = {"treatments": sam, "ema": 0.9, "steps": 30, "checkpoint": "3 steps", "parallel": "fsdp"}
    whole = train_on_two(recipe(**changes, out=str(tmp_path / "whole")), tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(**changes, out=str(tmp_path / "stopped"))))
    ranks = start_ranks("train", "-q", str(file))
    run = Run(tmp_path / "stopped")
    while not (run.path / "checkpoints" / "last").exists() and ranks[0].poll() is None:
        time.sleep(0.05)
    for rank in ranks if by == signal.SIGKILL else ranks[:1]:
        os.kill(rank.pid, by)
    for rank in ranks:
        rank.wait(120)
    assert run.status["status"] in ("running", "interrupted")
    assert 0 < run.checkpoints.read("last")[1]["step"] < 30
    done = run_ranks("train", "-q", "--resume", str(run.path))
    assert done.returncode == 0, done.stderr
    assert same_bits(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["fsdp", "ddp"])
def test_another_number_of_processes_goes_on(recipe, tmp_path, begun):
    """A run that two processes began is ended by one, and the other way around."""
    changes = {"treatments": [{"sam": {"m": 20, "every": 2}}], "ema": 0.9, "steps": 30, "checkpoint": "3 steps"}
    whole = train(recipe(**changes, out=str(tmp_path / "whole")))
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(**changes, parallel=begun, out=str(tmp_path / "stopped"))))
    ranks = start_ranks("train", "-q", str(file), processes=2 if begun == "fsdp" else 1)
    run = Run(tmp_path / "stopped")
    while not (run.path / "checkpoints" / "last").exists() and ranks[0].poll() is None:
        time.sleep(0.02)
    os.kill(ranks[0].pid, signal.SIGTERM)
    for rank in ranks:
        rank.wait(120)
    assert 0 < run.checkpoints.read("last")[1]["step"] < 30
    if begun == "fsdp":
        resume(run.path, parallel="ddp")
    else:
        done = run_ranks("train", "-q", "--resume", str(run.path), "parallel=fsdp")
        assert done.returncode == 0, done.stderr
    assert run.status["status"] == "finished"
    assert difference(whole, run) <= 1e-9


def trainer_of_two(plain):
    """Build the first of two trainers, as far as it comes without the other."""
    built = build_recipe({**plain, "parallel": "fsdp"})
    return Trainer(built, open_data(built.data), 10, Distributed(0, 2), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, r"precision=fp16 \(use bf16\)"),
        ({"compile": True}, "compile=true"),
        ({"optimizer": "lamb"}, "optimizer=lamb"),
        ({"logging": {"trajectory": 10}}, r"logging\.trajectory"),
        ({"task": {"name": "dino", "local_crops": 0}, "data": "digits"}, "the task dino"),
        ({"task": "contrastive", "accumulate": 2}, "the task contrastive with micro-batches"),
        ({"treatments": [{"sam": {"m": 5}}]}, "40 images do not divide into ascents of 5 images on 2 processes"),
        ({"treatments": [{"sam": {"m": 12}}]}, "40 images do not divide into ascents of 12 images on 2 processes"),
    ],
)
def test_what_cannot_be_combined_is_one_sentence_before_training(tiny, changes, said):
    with pytest.raises(RecipeError, match=said):
        trainer_of_two(tiny(**changes))


def test_one_process_has_nothing_to_divide(tiny):
    built = build_recipe(tiny(parallel="fsdp"))
    trainer = Trainer(built, open_data(built.data), 10, Distributed(), torch.device("cpu"))
    assert trainer.shards is None
    assert any("there is one process" in notice for notice in trainer.notices)


def test_the_way_of_sharing_is_no_part_of_the_digest(tiny):
    assert build_recipe(tiny(parallel="fsdp")).digest("x") == build_recipe(tiny()).digest("x")


def test_blocks_are_those_of_the_anatomy(tiny):
    vit = create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=4, normalize=True)
    assert find_blocks(vit, ImageSpec(4, 3, (32, 32))) == list(vit.backbone.blocks)


def test_shared_weights_and_single_numbers_are_refused():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    network = nn.Sequential(first, second)
    refuse_indivisible(network, [first, second])
    second.weight = first.weight
    with pytest.raises(RecipeError, match=r"cannot divide '1\.weight', which a block shares"):
        refuse_indivisible(network, [first, second])
    refuse_indivisible(network, [])
    network.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(RecipeError, match=r"scale', a single number"):
        refuse_indivisible(network, [])
