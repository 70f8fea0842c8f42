"""Everything that comes from outside, at the command line: one sentence and an exit code, never the last resort."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from vitclinic._core.errors import RunError
from vitclinic._core.io import write_bytes, write_text

LONG = "x" * 5000


def command(monkeypatch, capsys, scratch, *words):
    """Run the command in this process; return exit code and errors."""
    import tempfile

    from vitclinic.cli import main

    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    monkeypatch.setattr(sys, "argv", ["vitclinic", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "place", ["/dev/null", LONG, "~nobody-of-this-name/x", "/etc/passwd", "/dev/zero", "a\0b", "/"]
)
@pytest.mark.parametrize(
    "words",
    [
        ["train", "data={}"],
        ["train", "{}"],
        ["train", "digits", "out={}", "steps=1"],
        ["train", "--resume", "{}"],
        ["examine", "{}"],
        ["examine", "timm:resnet18", "--random-weights", "--data", "{}"],
        ["examine", "timm:resnet18@{}", "--data", "digits"],
        ["examine", "timm:@{}", "--data", "digits"],
        ["anatomy", "{}"],
        ["prescribe", "--data", "{}"],
        ["prescribe", "--data", "digits", "--from", "{}"],
        ["study", "{}"],
        ["study", "C6", "--data", "{}"],
        ["report", "{}"],
        ["corrupt", "{}", "--out", "copies"],
        ["predict", "{}", "photos"],
        ["features", "{}", "-o", "f.parquet"],
        ["features", "timm:resnet18", "--data", "{}", "-o", "f.parquet"],
        ["export", "{}", "--to", "onnx"],
        ["transfer", "{}", "--data", "digits", "--out", "transferred"],
        ["transfer", "timm:resnet18", "--data", "{}"],
        ["train", "data=torchvision:CIFAR10@{}", "--dry-run"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_place_that_cannot_be_used(words, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error = command(monkeypatch, capsys, tmp_path.parent, *(word.replace("{}", place) for word in words))
    assert code in (2, 3, 4), error
    assert "Traceback" not in error


@pytest.mark.parametrize("place", ["/dev/null", LONG, "~nobody-of-this-name/x", "/etc/passwd", "a\0b", ""])
def test_a_place_that_cannot_be_watched(place, tmp_path, monkeypatch, capsys, ends_soon):
    code, error = command(monkeypatch, capsys, tmp_path, "watch", place)
    assert code in (2, 3, 4), error


@pytest.mark.parametrize("place", ["", "/", LONG, "a\0b", "~nobody-of-this-name/x", "node", "pipe"])
@pytest.mark.parametrize(
    "words",
    [
        ["examine", "timm:resnet18", "--random-weights", "--data", "digits", "--report", "{}"],
        ["examine", "timm:resnet18", "--random-weights", "--data", "digits", "--fail-on", "a.b<1", "--junit", "{}"],
        ["report", "run", "--out", "{}"],
        ["features", "timm:resnet18", "--data", "digits", "-o", "{}.parquet"],
        ["predict", "timm:resnet18", "photos", "-o", "{}.csv"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(words, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for suffix in ("", ".parquet", ".csv"):
        os.mkfifo(tmp_path / f"pipe{suffix}")
        (tmp_path / f"node{suffix}").symlink_to("/dev/null")
    code, error = command(monkeypatch, capsys, tmp_path.parent, *(word.replace("{}", place) for word in words))
    assert code in (2, 3, 4), error
    assert len(list(tmp_path.iterdir())) == 7
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("place", ["", LONG, "a\0b", "~nobody-of-this-name/x"])
@pytest.mark.parametrize(
    "words",
    [
        ["corrupt", "digits", "--corruption", "fog", "--severity", "1", "--out", "{}"],
        ["transfer", "timm:resnet18", "--data", "digits", "--out", "{}"],
        ["study", "C6", "--data", "digits", "--out", "{}"],
        ["prescribe", "--data", "digits", "--out", "{}"],
        ["export", "run", "--to", "onnx", "--out", "{}"],
        ["demo", "--out", "{}"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_cannot_be_made_is_told_before_the_work(words, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error = command(monkeypatch, capsys, tmp_path.parent, *(word.replace("{}", place) for word in words))
    assert code in (2, 3, 4), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VITCLINIC_CACHE", "~nobody-of-this-name", "no such user"),
        ("VITCLINIC_CACHE", LONG, "Cannot look for the cache"),
        ("XDG_CACHE_HOME", LONG, "Cannot look for the cache"),
        ("XDG_CACHE_HOME", "~nobody-of-this-name", "no such user"),
        ("VITCLINIC_CACHE_SIZE", "9e400T", "set it to a size such as 5G"),
        ("VITCLINIC_CACHE_SIZE", "-5G", "set it to a size such as 5G"),
        ("VITCLINIC_CACHE_SIZE", "nan", "set it to a size such as 5G"),
    ],
)
def test_a_variable_that_cannot_be_meant(variable, value, message, monkeypatch):
    from vitclinic._core.errors import DataError
    from vitclinic.data.cache import cache_folder, cache_limit

    monkeypatch.delenv("VITCLINIC_CACHE")
    monkeypatch.setenv(variable, value)
    with pytest.raises(DataError, match=message):
        cache_limit() if variable.endswith("SIZE") else cache_folder()


@pytest.mark.parametrize(
    "problem", [MemoryError("Unable to allocate 2.73 TiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_what_fits_no_memory_is_no_bug(problem, tmp_path, monkeypatch, capsys):
    from vitclinic.data.corruptions import copies

    def refuse(*given, **more):
        raise problem

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copies, "corrupt_data", refuse)
    words = ("corrupt", "digits", "--out", "copies", "--size", "1000000")
    code, error = command(monkeypatch, capsys, tmp_path.parent, *words)
    assert code == 2
    assert error.startswith("error: There is not enough memory (")
    assert "allocate" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corrupt", "digits", "--out", ""], "it is empty"),
        (["features", "timm:resnet18", "--data", "", "-o", "f.parquet"], "data.source"),
        (["transfer", "timm:resnet18", "--data", ""], "data.source"),
        (["study", "C6", "--data", ""], "data.source"),
        (["study", "C6", "--data", "\udcff"], "data.source"),
        (["features", "timm:resnet18", "--data", "\udcff", "-o", "f.parquet"], "data.source"),
        (["train", "digits", "max_time=99999999999999999999h"], "at most 10 years"),
        (["examine", "timm:resnet18", "--data", "digits", "--budget", "99999999999999999999h"], "at most 10 years"),
        (["train", "digits", "model.depth=10000000"], "'depth' must be at most"),
        (["train", "digits", "model.embed_dim=60000", "model.depth=1000"], "too large for any machine"),
        (["train", "digits", "model.img_size=1000000"], "model.img_size"),
        (["train", "digits", "model.mlp_ratio=0"], "'mlp_ratio' must be above 0"),
        (["train", "digits", "model.mlp_ratio=-1"], "'mlp_ratio' must be above 0"),
        (["train", "digits", "model.mlp_ratio=0.01", "model.embed_dim=64"], "no hidden neuron"),
        (["report", "x", "--out", ""], "it is empty"),
        (["examine", "x", "--out", " "], "it is empty"),
        (["examine", "timm:resnet18", "--data", "digits", "--seed", "-1"], "--seed"),
        (["train", "digits", "epochs="], "has no value"),
        (["train", "digits", "device=meta", "steps=1"], "'device'"),
        (["train", "hf:/etc"], "There is no recipe"),
    ],
)
def test_a_value_that_cannot_be_meant(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error = command(monkeypatch, capsys, tmp_path.parent, *words)
    assert code == 2
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_set_of_hugging_face(tmp_path):
    pytest.importorskip("datasets")
    from vitclinic._core.errors import DataError
    from vitclinic.data import open_data

    (tmp_path / "notes.txt").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="hf:"):
        open_data(f"hf:{tmp_path}")


def test_the_last_resort_is_a_sentence_a_file_and_a_code(tmp_path, monkeypatch, capsys):
    from vitclinic.training import overrides

    monkeypatch.setattr(overrides, "parse_word", lambda word: 1 / 0)
    code, error = command(monkeypatch, capsys, tmp_path, "train", "steps=1")
    assert code == 70
    assert error.count("\n") == 1
    assert "a bug in vitclinic" in error
    (file,) = tmp_path.iterdir()
    assert str(file) in error
    assert "ZeroDivisionError" in file.read_text()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "no", "/x/y"), "'/x/y' cannot be read or written: permission denied."),
        (OSError(28, "no"), "A file cannot be read or written: no space left on device."),
    ],
)
def test_what_the_machine_refuses_is_no_bug(error, sentence, tmp_path, monkeypatch, capsys):
    from vitclinic.training import overrides

    def refuse(word):
        raise error

    monkeypatch.setattr(overrides, "parse_word", refuse)
    code, told = command(monkeypatch, capsys, tmp_path, "train", "steps=1")
    assert (code, told) == (4, f"error: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


def test_no_message_speaks_of_types_of_the_library():
    from vitclinic._core.errors import RecipeError
    from vitclinic.training import build_recipe

    words = (
        "model.img_size",
        "data.limit",
        "data.fraction",
        "ema",
        "clip",
        "freeze",
        "layer_decay",
        "logging",
        "epochs",
    )
    for word in (*words, "checkpoint", "validation", "progressive_resizing", "data.augment.randaugment", "max_time"):
        for value in ("[]", "{x: 1}", "-1", "x", "[x]"):
            with suppress(RecipeError):
                build_recipe(None, [f"{word}={value}"])
                continue
            with pytest.raises(RecipeError) as caught:
                build_recipe(None, [f"{word}={value}"])
            assert not re.search(r"constrained|instance of|function-|Config\b|NoneType|union", str(caught.value))


def test_a_value_of_two_types_is_one_sentence():
    from vitclinic._core.errors import RecipeError
    from vitclinic.training import build_recipe

    with pytest.raises(RecipeError) as caught:
        build_recipe({"model": {"name": "x", "img_size": "y"}})
    assert str(caught.value) == "'model.img_size': input should be a valid integer or a valid list (got 'y')."


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_torchrun_that_holds_something_else(name, monkeypatch):
    from vitclinic._core.environment import read_count
    from vitclinic._core.errors import RecipeError

    for text in ("x", "-1", "1.5", "9" * 5000):
        monkeypatch.setenv(name, text)
        with pytest.raises(RecipeError, match=f"{name} is '.*torchrun sets a number"):
            read_count(name)
    monkeypatch.setenv(name, " 4 ")
    assert read_count(name) == 4


def test_processes_that_cannot_meet(monkeypatch):
    import torch

    from vitclinic._core.distributed import join_processes
    from vitclinic._core.errors import RecipeError

    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(RecipeError, match=r"^The 2 processes cannot meet: .*; start them with torchrun\.$"),
        join_processes(torch.device("cpu")),
    ):
        pass


@pytest.mark.parametrize(
    ("size", "rank", "silent"), [("2", "1", True), ("2", "0", False), ("1", "1", False), ("", "7", False)]
)
def test_only_followers_are_silent(size, rank, silent, monkeypatch):
    from vitclinic.cli.common import follows

    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    assert follows() is silent


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(RunError, match=r"is a (device or a pipe|folder)"):
            write_text(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(RunError, match="Cannot write"):
        write_bytes(tmp_path / LONG, b"")
    write_text(tmp_path / "page", "one")
    write_text(tmp_path / "page", "two")
    assert (tmp_path / "page").read_text() == "two"


class Closed:
    """A standard output whose reader is gone, or whose disk is full."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise OSError(28, "No space left on device")

    def isatty(self):
        return False

    def fileno(self):
        raise ValueError("it has no number")


def test_work_goes_on_when_nobody_reads(monkeypatch):
    from vitclinic.cli.common import console_for

    monkeypatch.setattr(sys, "stdout", Closed())
    console_for(verbose=False, quiet=False).print("step 1")


TRAIN = ("digits", "steps=2", "model.depth=1", "model.embed_dim=16", "model.num_heads=2", "data.limit=50", "workers=0")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["| head -1", "> /dev/full"])
def test_training_goes_on_when_its_output_is_gone_or_full(end, tmp_path):
    line = f"{sys.executable} -m vitclinic train {' '.join(TRAIN)} data.augment=none out=run {end}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root makes device nodes")
def test_a_device_node_is_still_one_after_a_report_onto_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        os.mknod("node", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container makes no device nodes")
    for words in (["report", "run", "--out", "node"], ["examine", "timm:resnet18", "--report", "node"]):
        code, error = command(monkeypatch, capsys, tmp_path.parent, *words)
        assert (code, "it is a device or a pipe" in error) == (4, True)
    assert stat.S_ISCHR(Path("node").stat().st_mode)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("report", "run", "--out"), ".html or .htm"),
        (("examine", "timm:resnet18", "--report"), ".html or .htm"),
        (("examine", "timm:resnet18", "--fail-on", "accuracy.accuracy<0.9", "--junit"), ".xml"),
        (("features", "timm:resnet18", "--data", "digits", "--out"), ".parquet"),
    ],
)
def test_a_slip_replaces_no_recipe(words, needed, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: digits\n")
    code, error = command(monkeypatch, capsys, tmp_path, *words, str(recipe))
    assert code == 2
    assert f"name a file that ends in {needed}" in " ".join(error.split())
    assert recipe.read_text() == "data: digits\n"


@pytest.mark.parametrize(("reasons", "code"), [((), 130), ((2,), 130), ((15,), 143), (("a text",), 130)])
def test_the_exit_code_is_that_of_the_signal(reasons, code):
    import typer

    from vitclinic.cli.common import resumable

    with pytest.raises(typer.Exit) as ended, resumable():
        raise KeyboardInterrupt(*reasons)
    assert ended.value.exit_code == code


def test_dev_null_is_still_there():
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_closed_streams_are_the_null_device(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
    monkeypatch.setattr("sys.argv", ["vitclinic", "list", "recipes"])
    from vitclinic.cli import main

    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.slow
def test_training_needs_no_streams(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "{model: {name: vit_tiny_fitted, patch_size: 2, embed_dim: 16, depth: 1, num_heads: 2}, steps: 2}"
    )
    words = ["train", str(recipe), "data=digits", f"out={tmp_path / 'run'}"]
    shell = f"exec {shlex.join([sys.executable, '-m', 'vitclinic', *words])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=240).returncode == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"
