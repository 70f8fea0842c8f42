"""Run directories as bad disks and careless hands leave them: each file falls back, or is one sentence."""

import json
import shutil

import pytest
import yaml

from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic._core.errors import DamagedFileError, RecipeError, RunError
from vitclinic.training import Run, build_recipe, load_model, resume, train
from vitclinic.training.callbacks import read_projections
from vitclinic.training.rows import read_rows

from .conftest import TINY


class Stop(Callback):
    """Interrupts a run after a step, as Ctrl-C would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            raise KeyboardInterrupt


EVERY = {"checkpoint": {"every": "1 steps"}, "validation": {"every": "2 steps"}, "steps": 4}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """An interrupted run, not to be changed."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        train({**TINY, **EVERY, "out": str(folder)}, callbacks=[Stop(4)])
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    return Run(shutil.copytree(stopped, tmp_path / "run"))


WRONG = {
    "empty": b"",
    "binary": bytes(range(256)),
    "utf-16": '{"status": "finished"}'.encode("utf-16"),
    "list": b"[1, 2]",
    "text": b'"finished"',
    "other keys": b"{}",
    "wrong types": b'{"status": 3, "step": "x", "classes": 1, "size": 2, "model.safetensors": 5}',
    "deep": b"[" * 100_000,
    "digits": b'{"step": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_files_of_a_run_that_hold_something_else(copy, content, caplog):
    for name in ("data.json", "recipe.yaml"):
        good = (copy.path / name).read_bytes()
        (copy.path / name).write_bytes(content)
        with pytest.raises(DamagedFileError, match=name):
            load_model(copy.path)
        (copy.path / name).write_bytes(good)
    for checkpoint in ("last", "best"):
        (copy.path / "checkpoints" / checkpoint / "checksums.json").write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"checksums\.json|damaged"):
            copy.checkpoints.read_model(checkpoint)
        with pytest.raises(DamagedFileError, match=r"checksums\.json|damaged"):
            copy.checkpoints.model_checksum(checkpoint)
    (copy.path / "trajectory.npz").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"trajectory\.npz"):
        read_projections(copy.path)
    (copy.path / "status.json").write_bytes(content)
    assert copy.status["status"] == "interrupted"
    assert "status.json" in caplog.text


def test_a_run_without_a_status_resumes_and_finishes(copy, stopped):
    (copy.path / "status.json").unlink()
    assert resume(copy.path).status["status"] == "finished"


def test_steps_that_cannot_be(copy):
    status = json.loads((copy.path / "status.json").read_text())
    (copy.path / "status.json").write_text(json.dumps({**status, "total_steps": -1}))
    run = resume(copy.path)
    assert run.status["status"] == "finished"
    assert run.status["total_steps"] == run.status["step"] == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("framed", wrong) for wrong in (3, [], [0, 0], [8, "8"])],
        ("whole", None),
        ("text", 3),
        ("text", {"tokens": [], "length": "x"}),
        *[("counts", wrong) for wrong in ({}, {"train": 0}, {"train": "x"})],
        ("size", [0, 8]),
        ("size", [8]),
        ("classes", [1, 2]),
        ("channels", 0),
    ],
)
def test_data_facts_that_cannot_be(copy, field, value):
    facts = json.loads((copy.path / "data.json").read_text())
    (copy.path / "data.json").write_text(json.dumps({**facts, field: value}))
    with pytest.raises(DamagedFileError, match=rf"data\.json' is damaged \('{field}' is missing or wrong\)"):
        load_model(copy.path)


@pytest.mark.parametrize(
    "results", [3, {"test": 3}, {"test": {}}, {"test": {"accuracy": None, "count": 3, "step": 4}}, {"test": [1]}]
)
def test_damaged_results_are_none_with_a_warning(copy, results, caplog):
    status = json.loads((copy.path / "status.json").read_text())
    (copy.path / "status.json").write_text(json.dumps({**status, "status": "finished", "results": results}))
    assert copy.results == {}
    assert "'results' are wrong" in caplog.text


def _flag(content, offset, value):
    """Write a 16-bit field of each entry's headers in a zip: the flags are 6 bytes in, the method 8."""
    for mark, extra in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = content.find(mark)
        while place >= 0:
            at = place + offset + extra
            content = content[:at] + value.to_bytes(2, "little") + content[at + 2 :]
            place = content.find(mark, place + 4)
    return content


@pytest.mark.parametrize(("offset", "value"), [(6, 1), (8, 99)], ids=["encrypted", "unknown method"])
def test_archives_that_claim_what_zipfile_does_not_do(copy, offset, value):
    import numpy as np

    from vitclinic.probes.guards import Partial

    file = copy.path / "trajectory.npz"
    np.savez(file, step=np.array([0]), epoch=np.array([0.0]), projection=np.zeros((1, 4)))
    file.write_bytes(_flag(file.read_bytes(), offset, value))
    with pytest.raises(DamagedFileError, match=r"trajectory\.npz"):
        read_projections(copy.path)
    assert Partial(file).read() is None


@pytest.mark.parametrize("total", [1, 2, 8, True, 10**15])
def test_the_number_of_steps_is_the_recipe_s_whatever_the_status_says(copy, total):
    at_two = copy.checkpoints.folder / "previous"
    shutil.rmtree(copy.checkpoints.folder / "last")
    assert copy.checkpoints.read("previous")[1]["step"] < 4
    status = json.loads((copy.path / "status.json").read_text())
    (copy.path / "status.json").write_text(json.dumps({**status, "total_steps": total}))
    run = resume(copy.path)
    assert at_two.exists()
    assert run.status["status"] == "finished"
    assert run.status["total_steps"] == run.status["step"] == 4


def test_an_edited_recipe_is_not_resumed_without_a_status_either(copy):
    (copy.path / "status.json").unlink()
    file = copy.path / "recipe.yaml"
    plain = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**plain, "optimizer": {**plain["optimizer"], "lr": 1.0}}))
    with pytest.raises(RunError, match=r"recipe\.yaml' was edited"):
        resume(copy.path)


@pytest.mark.parametrize(
    "edit",
    [
        ("data.json", {"classes": [str(label) for label in range(9, -1, -1)]}),
        ("recipe.yaml", {"model": {**TINY["model"], "num_heads": 4}}),
        ("recipe.yaml", {"treatments": ["relu_activation"]}),
    ],
    ids=["classes", "heads", "treatment"],
)
def test_weights_are_not_used_with_files_that_they_were_not_made_with(copy, edit):
    name, changes = edit
    file = copy.path / name
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))  # YAML, which JSON is part of
    if name == "data.json":
        file.write_text(json.dumps(yaml.safe_load(file.read_text())))
    for use in (load_model, resume):
        with pytest.raises(RunError, match=rf"{name}' was edited"):
            use(copy.path)
    with pytest.raises(RunError, match=rf"{name}' was edited"):
        train({**TINY, **EVERY, "init": str(copy.path), "out": str(copy.path.parent / "next")})


def test_weights_of_version_0_2_name_no_files_and_are_read(copy):
    for name in copy.checkpoints.names():
        model, state = copy.checkpoints.read(name)
        copy.checkpoints.save([name], model, state)
    assert load_model(copy.path).classes[0] == "0"


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[]", b'{"kind": 3}', b"[" * 100_000])
def test_a_damaged_row_is_left_out(copy, line, caplog):
    file = copy.path / "metrics.jsonl"
    rows = read_rows(file)
    file.write_bytes(line + b"\n" + file.read_bytes())
    assert read_rows(file) == rows
    assert "1 damaged rows" in caplog.text


@pytest.mark.parametrize(
    "edit", [{"seed": 1}, {"batch_size": 20}, {"steps": 9}, {"optimizer": {"lr": 1.0}}, {"data": {"augment": "deit"}}]
)
def test_an_edited_recipe_is_not_resumed(copy, edit):
    file = copy.path / "recipe.yaml"
    plain = yaml.safe_load(file.read_text())
    for key, value in edit.items():
        plain[key] = {**plain[key], **value} if isinstance(value, dict) else value
    file.write_text(yaml.safe_dump(plain))
    with pytest.raises(RunError, match=r"recipe\.yaml' was edited"):
        resume(copy.path)


def test_what_changes_no_number_may_be_edited(copy):
    file = copy.path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "workers": 0, "device": "cpu"}))
    copy.refuse_edited_recipe()


def test_a_damaged_best_does_not_keep_a_run_from_its_end(copy, caplog):
    (copy.path / "checkpoints" / "best" / "model.safetensors").write_bytes(b"?")
    run = resume(copy.path)
    assert run.status["status"] == "finished"
    assert run.results["val"]["count"] == run.results["test"]["count"] == 180


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "checksums.json"])
def test_a_device_in_the_place_of_a_file_does_not_hang(copy, name, caplog):
    file = copy.path / "checkpoints" / "last" / name
    file.unlink()
    file.symlink_to("/dev/zero")
    assert resume(copy.path).status["status"] == "finished"
    assert "damaged" in caplog.text or "regular file" in caplog.text


def test_checkpoints_that_may_not_be_listed(copy, monkeypatch):
    from pathlib import Path

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RunError, match="checkpoints' cannot be read: permission denied"):
        copy.checkpoints.names()


def test_a_run_that_starts_over_says_so(copy, caplog):
    shutil.rmtree(copy.path / "checkpoints")
    again = resume(copy.path)
    assert "starts over" in caplog.text
    assert drop_timing(again.metrics)[0]["step"] == 1


def test_a_run_without_a_finite_gradient_is_not_finished(tiny):
    run = train(tiny(treatments=[{"sam": {"rho": 1e30}}], checkpoint={"every": "6 steps"}))
    assert run.status["status"] == "diverged"
    assert "finite gradient" in run.status["reason"] or "loss" in run.status["reason"]


def test_the_only_checkpoint_being_bad_is_said(tiny, capsys):
    import torch
    from rich.console import Console

    from vitclinic.training.display import show_result

    class Poison(Callback):
        def on_step(self, trainer):
            with torch.no_grad():
                next(trainer.network.parameters()).fill_(float("nan"))

    run = train(tiny(checkpoint={"every": "1 steps"}, validation={"every": 100}), callbacks=[Poison()])
    assert run.status["status"] == "diverged"
    show_result(run, Console())
    assert "before any good checkpoint" in capsys.readouterr().out


def test_every_command_to_go_on_with_is_a_line_and_can_be_copied(tiny, tmp_path, capsys):
    import shlex

    from rich.console import Console

    from vitclinic.training.display import show_result

    show_result(train(tiny(out=str(tmp_path / "my runs" / "a [b]"), steps=1)), Console(width=60))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  vitclinic ")]
    run = str(tmp_path / "my runs" / "a [b]")
    commands = ["vitclinic", "predict", run, "IMAGES"], ["vitclinic", "examine", run]
    assert tuple(map(shlex.split, lines)) == commands


def test_the_command_that_goes_on_can_be_copied_whatever_the_folder_is_called(tiny, tmp_path, capsys):
    import shlex

    from rich.console import Console

    from vitclinic.training.display import show_result

    run = train(tiny(out=str(tmp_path / "my runs" / "a [b]"), steps=2))
    run.write_status("interrupted", reason="SIGINT at step 1")
    show_result(run, Console(width=400))
    line = next(one for one in capsys.readouterr().out.splitlines() if "--resume" in one)
    assert shlex.split(line.partition(": ")[2]) == ["vitclinic", "train", "--resume", str(run.path)]


class Listen(Callback):
    """Hears what a run says at its start."""

    def on_train_start(self, trainer):
        self.heard = " ".join(trainer.notices)


@pytest.mark.parametrize("inner", ["inner", "test"])
def test_one_class_is_told(tmp_path, picture, inner):
    for number in range(4):
        (tmp_path / "wrap" / inner / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture(number, (8, 8)).save(tmp_path / "wrap" / inner / "ab"[number % 2] / f"{number}.png")
    listen = Listen()
    plain = {**TINY, "data": str(tmp_path / "wrap"), "steps": 1, "out": str(tmp_path / "run")}
    train(plain, callbacks=[listen])
    assert f"has one class, '{inner}', so that any network is right" in listen.heard


def test_what_a_run_is_too_short_for_is_told(tiny):
    changes = {"steps": 2, "checkpoint": {"keep_epochs": [0, 700]}, "schedule": {"warmup": "100%"}}
    listen = Listen()
    train(tiny(**changes, data={"source": "digits", "limit": 1, "augment": "none"}), callbacks=[listen])
    assert "the whole run" in listen.heard
    assert "one label" in listen.heard
    assert "names epoch 700, but the run ends after 80" in listen.heard


def test_patches_that_cut_pixels_off(tiny):
    with pytest.raises(RecipeError, match="Patches of 3 x 3 do not cover 8 x 8"):
        train(tiny(model={**TINY["model"], "patch_size": 3}))


@pytest.mark.parametrize("device", ["mps", "xla", "meta", "cuda:99", "nothing", "cpu:x"])
def test_a_device_that_is_not_there(tiny, device):
    with pytest.raises(RecipeError, match="'device'"):
        train(tiny(device=device))


def test_random_weights_are_not_a_run_s(copy):
    import torch

    from vitclinic.exam.targets import resolve

    with pytest.raises(RecipeError, match="random_weights"):
        resolve(str(copy.path), torch.device("cpu"), random_weights=True)


def test_a_batch_that_no_memory_holds():
    from vitclinic.training.network import check_memory

    recipe = build_recipe({"batch_size": 2**20})
    with pytest.raises(RecipeError, match="batch_size"):
        check_memory(recipe.batch_size, (3, 4096, 4096))
