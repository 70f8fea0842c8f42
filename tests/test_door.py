"""Everything that comes from outside, at the command line: one sentence and an exit code, never the last resort."""

import os
import stat
import sys
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
    ],
    ids=lambda words: " ".join(words),
)
def test_a_place_that_cannot_be_used(words, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, error = command(monkeypatch, capsys, tmp_path.parent, *(word.replace("{}", place) for word in words))
    assert code in (2, 3, 4), error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corrupt", "digits", "--out", ""], "it is empty"),
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


@pytest.mark.parametrize(("reasons", "code"), [((), 130), ((2,), 130), ((15,), 143), (("a text",), 130)])
def test_the_exit_code_is_that_of_the_signal(reasons, code):
    import typer

    from vitclinic.cli.common import resumable

    with pytest.raises(typer.Exit) as ended, resumable():
        raise KeyboardInterrupt(*reasons)
    assert ended.value.exit_code == code


def test_dev_null_is_still_there():
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
