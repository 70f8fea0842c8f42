"""`vitclinic corrupt`: copies that are data sources again, made piece by piece."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from tests.processes import Command
from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic._core.lock import hold_lock
from vitclinic.cli import main
from vitclinic.data import evaluation_batches, open_data
from vitclinic.data.corruptions import NINETEEN, Corruption
from vitclinic.data.corruptions import copies as copying
from vitclinic.data.corruptions.copies import corrupt_data
from vitclinic.data.folder import class_folders
from vitclinic.data.parquet import parquet_bytes

CLASSES = ["b", "a/x", ".hidden", "100% [red]ü"]


@pytest.fixture
def source(tmp_path):
    """Parquet with train and test images of 36 x 36, and classes in no order."""
    folder = tmp_path / "set"
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 10)):
        pixels = random.integers(0, 256, (count, 36, 36, 3), dtype=np.uint8)
        files = [copying.io.BytesIO() for _ in range(count)]
        for file, image in zip(files, pixels, strict=True):
            Image.fromarray(image).save(file, "PNG")
        labels = np.arange(count) % 3  # the last class has no image
        content = parquet_bytes([f.getvalue() for f in files], [f"{i}" for i in range(count)], labels, CLASSES)
        (folder / f"{split}.parquet").write_bytes(content)
    return folder


def images_of(dataset, split="test"):
    return torch.cat([batch.images for batch in evaluation_batches(dataset, split, 4)])


@pytest.mark.parametrize("form", ["parquet", "png"])
@pytest.mark.parametrize("split", ["test", "all"])
def test_a_copy_reads_back_as_the_same_set_corrupted(source, tmp_path, form, split):
    folders = corrupt_data(
        str(source), tmp_path / "c", corruptions="fog,snow", severities="2,5", form=form, split=split
    )
    assert [folder.name for folder in folders] == ["fog-2", "fog-5", "snow-2", "snow-5"]
    original = open_data(str(source))
    copy = open_data(str(folders[0]))
    assert copy.classes == original.classes == tuple(CLASSES)
    assert copy.size == (36, 36)
    for name in ["test"] if split == "test" else ["train", "test"]:
        by_label = np.argsort(original.splits[name].labels, kind="stable") if form == "png" else slice(None)
        assert copy.splits[name].labels.tolist() == original.splits[name].labels[by_label].tolist()
        expected = Corruption("fog", 2)(images_of(original, name), original.splits[name].rows)[by_label]
        torch.testing.assert_close(images_of(copy, name), expected, atol=1e-6, rtol=0)
    described = json.loads((folders[0] / "corruption.json").read_text())
    assert described["corruption"] == "fog"
    assert described["parameters"] == "cifar10-c"
    assert not list((tmp_path / "c").glob(".*"))


def test_a_copy_of_a_test_split_can_be_examined_and_says_that_it_cannot_be_trained_on(source, tmp_path):
    import vitclinic

    (folder,) = corrupt_data(str(source), tmp_path / "c", corruptions=["contrast"], severities=1)
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 4))
    exam = vitclinic.examine(network, data=str(folder), probes=["cost"], out=tmp_path / "exams")
    assert exam["cost"].status == "ok"
    with pytest.raises(
        DataError, match=r"no images in its train split; it has test \(10\); choose the split test or all"
    ):
        corrupt_data(str(folder), tmp_path / "again", split="train")
    with pytest.raises(DataError, match="no training images; it can be examined but not trained on"):
        vitclinic.train(data=folder, steps=1, out=tmp_path / "run")


def test_a_limit_is_a_part_of_the_same_copy(source, tmp_path):
    (whole,) = corrupt_data(str(source), tmp_path / "a", corruptions="gaussian_noise", severities=3)
    (part,) = corrupt_data(str(source), tmp_path / "b", corruptions="gaussian_noise", severities=3, limit=4)
    everything = {image.numpy().tobytes() for image in images_of(open_data(str(whole)))}
    some = [image.numpy().tobytes() for image in images_of(open_data(str(part)))]
    assert len(some) == 4
    assert everything.issuperset(some)


@pytest.mark.parametrize("form", ["parquet", "png"])
def test_what_was_interrupted_goes_on(source, tmp_path, form, monkeypatch):
    monkeypatch.setattr(copying, "_PIECE_BYTES", 3 * 36 * 36 * 3)
    monkeypatch.setattr(copying, "_BATCH_VALUES", 3 * 36 * 36 * 3)
    options = {"corruptions": "frost", "severities": [1, 2], "form": form}
    corrupted = []
    called = Corruption.__call__
    monkeypatch.setattr(Corruption, "__call__", lambda self, x, rows: corrupted.extend(rows) or called(self, x, rows))

    def stop(what, done, total):
        if what == "corrupting" and done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corrupt_data(str(source), tmp_path / "c", progress=stop, **options)
    assert (tmp_path / "c" / "frost-1").is_dir()
    assert not (tmp_path / "c" / "frost-2").exists()
    corrupted.clear()
    seen = []
    corrupt_data(str(source), tmp_path / "c", progress=lambda *told: seen.append(told), **options)
    assert len(corrupted) == 10 - 3  # the first piece of frost-2 was there
    assert seen[-1] == ("corrupting", 20, 20)
    monkeypatch.undo()
    corrupt_data(str(source), tmp_path / "fresh", **options)
    for severity in (1, 2):
        again, fresh = (open_data(str(tmp_path / place / f"frost-{severity}")) for place in ("c", "fresh"))
        assert torch.equal(images_of(again), images_of(fresh))


def test_a_killed_command_goes_on(source, tmp_path):
    process = Command(["corrupt", str(source), "--out", str(tmp_path / "c")])
    ends = time.monotonic() + 60
    while process.poll() is None and not list((tmp_path / "c").glob("*_noise-2")) and time.monotonic() < ends:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    folders = corrupt_data(str(source), tmp_path / "c")
    assert len(folders) == len(NINETEEN) * 5
    assert all(len(open_data(str(folder)).test) == 10 for folder in (folders[0], folders[1], folders[-1]))
    assert not list((tmp_path / "c").glob(".*"))


def test_the_lock_file_of_a_process_killed_at_its_end_is_removed(source, tmp_path):
    corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    (tmp_path / "c" / ".fog-1.lock").touch()
    corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    assert not list((tmp_path / "c").glob(".*"))


def test_a_second_process_is_told_to_wait(source, tmp_path):
    (tmp_path / "c").mkdir()
    with hold_lock(tmp_path / "c" / ".fog-1.lock", "busy"), pytest.raises(RunError, match="Another process is writing"):
        corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    (folder,) = corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    assert len(open_data(str(folder)).test) == 10


def test_what_another_process_finishes_in_the_meantime_is_kept(source, tmp_path, monkeypatch):
    """The copy appears between the look at its place and the lock."""
    calls = []

    @contextmanager
    def late(path, busy):
        calls.append(path)
        monkeypatch.setattr(copying, "hold_lock", hold_lock)
        corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
        with hold_lock(path, busy):
            yield

    monkeypatch.setattr(copying, "hold_lock", late)
    (folder,) = corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    assert calls
    assert len(open_data(str(folder)).test) == 10
    assert not list((tmp_path / "c").glob(".*"))


def test_the_same_data_by_another_path_is_the_same(source, tmp_path, monkeypatch):
    (folder,) = corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)
    before = folder.stat().st_mtime_ns
    monkeypatch.chdir(tmp_path)
    corrupt_data(source.name, tmp_path / "c", corruptions="fog", severities=1)
    assert folder.stat().st_mtime_ns == before


def test_what_is_there_is_never_overwritten(source, tmp_path):
    out = tmp_path / "c"
    (out / "fog-1").mkdir(parents=True)
    (out / "fog-1" / "mine.txt").write_text("mine")
    with pytest.raises(RecipeError, match="already exists and is not this copy"):
        corrupt_data(str(source), out, corruptions="snow,fog", severities=1)
    assert [path.name for path in out.rglob("*")] == ["fog-1", "mine.txt"]  # nothing was begun either
    (folder,) = corrupt_data(str(source), out, corruptions="snow", severities=1)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    corrupt_data(str(source), out, corruptions="snow", severities=1)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(RecipeError, match="is not this copy"):
        corrupt_data(str(source), out, corruptions="snow", severities=1, seed=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"corruptions": "fogg"}, RecipeError, "Did you mean 'fog'"),
        ({"severities": "6"}, RecipeError, "1, 2, 3, 4 or 5"),
        ({"size": -5}, RecipeError, r"at least 32 pixels per side \(got a size of -5\)"),
        ({"severities": "high"}, RecipeError, "such as 1,3, or all"),
        ({"split": "tset"}, RecipeError, "There is no split 'tset'"),
        ({"limit": 0}, RecipeError, "at least 1"),
        ({"form": "jpg"}, RecipeError, "There is no format 'jpg': choose parquet or png"),
        ({"corruptions": []}, RecipeError, r"Corruptions must be names.*\(got \[\]\)"),
        ({"corruptions": 7}, RecipeError, r"Corruptions must be names.*\(got 7\)"),
        ({"severities": []}, RecipeError, "such as 1,3, or all"),
        ({"severities": None}, RecipeError, "such as 1,3, or all"),
        ({"severities": [2.7]}, RecipeError, "such as 1,3, or all"),
        ({"size": 31}, RecipeError, "at least 32 pixels per side"),
    ],
)
def test_mistakes_are_sentences_and_leave_nothing(source, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        corrupt_data(str(source), tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("form", "lost"), [("parquet", "test-00000-of-00001.parquet"), ("png", "1 of its")])
def test_a_copy_that_has_lost_a_file_is_not_taken_for_whole(source, tmp_path, form, lost):
    (folder,) = corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1, form=form)
    next(folder.rglob(f"*.{form}")).unlink()
    with pytest.raises(RecipeError, match=f"is missing {lost}"):
        corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1, form=form)


@pytest.mark.parametrize("kind", ["pipe", "deep", "device"])
def test_a_description_that_cannot_be_read_is_not_waited_for(source, tmp_path, kind, ends_soon):
    file = tmp_path / "c" / "fog-1" / "corruption.json"
    file.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text("[" * 200_000)
    with pytest.raises(RecipeError, match="already exists and is not this copy"):
        corrupt_data(str(source), tmp_path / "c", corruptions="fog", severities=1)


def test_copies_do_not_go_into_the_data_itself(photo_folder):
    before = sorted(photo_folder.rglob("*"))
    for out in (photo_folder, photo_folder / "cat", photo_folder / "new"):
        with pytest.raises(RecipeError, match="is inside the data folder"):
            corrupt_data(str(photo_folder), out, corruptions="fog", severities=1)
    assert sorted(photo_folder.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_a_sentence(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="a part of the path is a file"):
        corrupt_data(str(source), tmp_path / "file" / "c", corruptions="fog", severities=1)


def test_folders_of_classes_are_safe_names():
    assert class_folders(["cat", "a b"]) == ["cat", "a b"]
    assert class_folders(["..", "a/../b", "nul\0"]) == ["%2E.", "a%2F..%2Fb", "nul%00"]
    assert class_folders(["Cat", "cat"]) == ["00000", "00001"]
    assert class_folders(["", "x" * 300]) == ["00000", "00001"]


def test_the_command(source, tmp_path, monkeypatch, capsys):
    out = tmp_path / "[red]c"
    words = ["corrupt", str(source), "--out", str(out), "--corruption", "fog", "--severity", "3", "--format", "png"]
    monkeypatch.setattr(sys, "argv", ["vitclinic", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "1 corrupted copy in" in capsys.readouterr().out
    assert len(list(out.rglob("*.png"))) == 10
