"""Shards: what is read from them, in which order, ahead of time, and what is told when they are damaged."""

import io
import itertools
import os
import pickle
import shutil
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.shard_files import sample, served, write_parquets, write_tar, write_tars
from vitclinic._core.errors import DataError
from vitclinic.data import Augment, DataConfig, TrainingStream, evaluation_batches, open_data
from vitclinic.data.factory import check_source
from vitclinic.data.shards.copies import copy_path, make_room
from vitclinic.data.shards.images import WindowOrder, shuffle_windows
from vitclinic.data.shards.names import expand_braces, list_shards, look_at
from vitclinic.data.split import name_images


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitclinic.data.shards.copies._PAUSES", ())


def open_config(source, **options):
    return open_data(DataConfig(source=str(source), **{"held_out": 0, **options}))


def reopened(dataset):
    """The data set as another process has it, with no shard open yet."""
    return pickle.loads(pickle.dumps(dataset))  # noqa: S301 (our own)


def copies(tmp_path):
    return [path for path in (tmp_path / "cache" / "shards").iterdir() if path.suffix in (".tar", ".images")]


def count_bytes(tmp_path):
    """Bytes of all copies, some of which may be deleted at this moment."""
    total = 0
    for path in copies(tmp_path):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_braces_stand_for_names():
    assert expand_braces("a/x-{08..11}.tar") == [f"a/x-{n}.tar" for n in ("08", "09", "10", "11")]
    assert expand_braces("{train-{0..1},val}-{a,b}") == [
        "train-0-a",
        "train-0-b",
        "train-1-a",
        "train-1-b",
        "val-a",
        "val-b",
    ]
    for wrong in ("x-{0..9.tar", "x-{a}.tar", "x-{5..1}.tar", "x-{0..99999999999}.tar", "{0..999}{0..999}.tar", "{}"):
        with pytest.raises(DataError):
            expand_braces(wrong)


def test_images_and_labels_are_those_that_were_written(tmp_path):
    write_tars(tmp_path / "tars")
    parquet = write_parquets(tmp_path / "parquet")
    tars = f"{tmp_path}/tars/train-{{000..005}}.tar"
    for source, count in {
        str(tmp_path / "tars"): 66,
        tars: 66,
        f"{parquet}/train-{{00000..00003}}.parquet": 40,
    }.items():
        dataset = open_config(source)
        assert len(dataset.train) == count
        pixels = np.asarray(dataset.train.read(np.arange(count)))
        for number in range(count):
            expected, label = sample(number)
            assert dataset.train.labels[number] == label
            assert np.array_equal(pixels[number], np.asarray(Image.open(io.BytesIO(expected))))
    assert dataset.classes == ("red", "green", "blue")


def test_an_order_permutes_shards_and_shuffles_windows_of_them():
    numbers = np.repeat(np.arange(10), [3, 5, 2, 4, 6, 3, 5, 2, 4, 6])
    order = shuffle_windows(numbers, 3, np.random.default_rng(0))
    assert sorted(order) == list(range(40))
    runs = [shard for shard, _ in itertools.groupby(numbers[order])]
    windows, seen = [], []
    for shard in numbers[order]:
        if not windows or (shard not in windows[-1] and len(windows[-1]) == 3):
            windows.append([])
        if shard not in windows[-1]:
            windows[-1].append(shard)
    seen = [shard for window in windows for shard in window]
    assert sorted(seen) == list(range(10))  # a shard is read in one window alone
    assert seen != sorted(seen)
    assert len(runs) > 10  # and mixed with the others of its window
    whole = WindowOrder(numbers, 3, seed=7)(np.arange(120))[0].reshape(3, 40)
    assert [sorted(epoch) for epoch in whole] == [list(range(40))] * 3
    assert not np.array_equal(whole[0], whole[1])
    assert np.array_equal(WindowOrder(numbers, 3, seed=7)(np.arange(77, 90))[0], whole.reshape(-1)[77:90])


def test_any_number_of_workers_reads_the_same_samples(tmp_path):
    write_tars(tmp_path / "tars")
    with served(tmp_path / "tars") as address:
        dataset = open_config(f"{address}/train-{{000..005}}.tar", window=2)
        stream = TrainingStream(dataset, Augment(level="light", mixup=0.8), seed=3)
        places = [range(start, start + 16) for start in range(0, 160, 16)]
        alone = list(stream.batches(places, workers=0))
        several = list(stream.batches(places, workers=2))
    local = TrainingStream(open_config(tmp_path / "tars", window=2), Augment(level="light", mixup=0.8), seed=3)
    for batch, other, third in zip(alone, several, local.batches(places, workers=0), strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.targets, other.targets)
        assert torch.equal(batch.images, third.images)
    assert open_config(tmp_path / "tars").digest == dataset.digest  # wherever they lie


def test_shards_are_fetched_ahead_of_their_places(tmp_path):
    write_tars(tmp_path / "tars", shards=8)
    with served(tmp_path / "tars") as address:
        dataset = open_config(f"{address}/train-{{000..007}}.tar", window=2)
        stream = TrainingStream(dataset, Augment(level="none"), seed=0)
        records = dataset.train.images.records
        for copy in copies(tmp_path):
            copy.unlink()
        stream[range(12, 16)]
        following = np.unique(records.numbers[stream.order(np.arange(16, 16 + dataset.train.images.span))[0]])
        deadline = time.monotonic() + 10
        while not all(copy_path(records.shards[n]).exists() for n in following) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert all(copy_path(records.shards[number]).exists() for number in following)
    assert len(copies(tmp_path)) < 8
    assert len(stream[range(16, 20)]) == 4  # the server is gone


def test_the_cache_keeps_to_its_size(tmp_path, monkeypatch):
    write_tars(tmp_path / "tars", shards=8)
    size = max(path.stat().st_size for path in (tmp_path / "tars").iterdir())
    monkeypatch.setenv("VITCLINIC_CACHE_SIZE", str(3 * size))
    with served(tmp_path / "tars") as address:
        with pytest.raises(DataError, match=r"data\.window"):
            open_config(f"{address}/train-{{000..007}}.tar", window=2)
        dataset = open_config(f"{address}/train-{{000..007}}.tar", window=1)
        stream = TrainingStream(dataset, Augment(level="none"), seed=0)
        for start in range(0, 88, 8):
            stream[range(start, start + 8)]
            assert count_bytes(tmp_path) <= 4.1 * size  # one may be on its way
        deadline = time.monotonic() + 10
        while count_bytes(tmp_path) > 3.1 * size and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count_bytes(tmp_path) <= 3.1 * size
    left = tmp_path / "cache" / "shards" / ".building-copy-x.tar-1"
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    make_room(left.parent, 0)
    assert not left.exists()


def test_a_damaged_copy_is_made_again(tmp_path, caplog):
    write_tars(tmp_path / "tars", shards=2)
    with served(tmp_path / "tars") as address:
        source = f"{address}/train-{{000..001}}.tar"
        before = np.asarray(open_config(source).train.read(np.arange(21)))
        for copy in copies(tmp_path):
            content = bytearray(copy.read_bytes())
            content[700] ^= 1
            copy.write_bytes(content)
        assert np.array_equal(before, np.asarray(open_config(source).train.read(np.arange(21))))
    assert caplog.text.count("is damaged and is made again") == 2


def test_splits_are_named_by_shards_or_are_whole_shards(tmp_path):
    write_tars(tmp_path / "tars", shards=3)
    write_tars(tmp_path / "tars", shards=2, name="set-val-{}.tar")
    named = open_config(tmp_path / "tars")
    assert (len(named.train), len(named.val)) == (33, 21)
    with pytest.raises(DataError, match="train_on_val"):
        open_config(tmp_path / "tars", train_on_val=True)
    many = open_data(str(write_tars(tmp_path / "many", shards=12, name="{:03}.tar")))
    held = [set(many.train.images.shards(split.rows)) for split in (many.train, many.val, many.test)]
    assert [len(shards) for shards in held] == [8, 2, 2]
    assert len(set.union(*held)) == 12
    assert sum(len(batch) for batch in evaluation_batches(many, "val", 5)) == len(many.val)
    write_tar(tmp_path / "tars" / "more.tar", {"a.png": b"", "a.cls": b"0"})
    with pytest.raises(DataError, match=r"more.tar' does not say train, val or test"):
        open_config(tmp_path / "tars")


def test_labels_are_numbers_or_names_and_may_be_in_json(tmp_path):
    image, _ = sample(0)
    write_tar(
        tmp_path / "a" / "0.tar", {"x/1.png": image, "x/1.json": b'{"label": "cat", "id": 3}', "README.md": b"hello"}
    )
    write_tar(tmp_path / "a" / "1.tar", {"x/1.PNG": image, "x/1.cls": b"dog\n"})
    named = open_config(tmp_path / "a")
    assert (named.classes, list(named.train.labels)) == (("cat", "dog"), [0, 1])
    assert name_images(named.train)[1].endswith("1.tar 'x/1'")
    write_tar(tmp_path / "a" / "2.tar", {"1.png": image, "1.cls": b"7"})
    with pytest.raises(DataError, match="numbers and labels that are names"):
        open_config(tmp_path / "a")


def damage_tar(path, how):
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "cut between":
        content = content[:4096]
    elif how == "header":
        content[2048 : 2048 + 512] = bytes(512)
    elif how == "not a tar":
        content = bytearray(b"hello" * 1000)
    elif how == "empty":
        content = bytearray()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "cut between", "header", "not a tar", "empty"])
def test_a_damaged_tar_is_told(tmp_path, how):
    damage_tar(write_tars(tmp_path / "tars") / "train-003.tar", how)
    with pytest.raises(DataError, match=r"train-003.tar' is damaged \(.*write or fetch this shard again"):
        open_config(tmp_path / "tars")
    skipped = open_config(tmp_path / "tars", on_error="skip")
    assert len(skipped.train) == 56
    assert len(skipped.skipped) == 1


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"1.png": b"x"}, "1': it has no label; expected 1.cls, or a 'label' in 1.json"),
        ({"1.png": b"x", "1.json": b"{"}, "1': it has no label"),
        ({"1.png": b"x", "1.json": b"[1]"}, "1': it has no label"),
        ({"1.cls": b"1"}, "1': it has no images; expected one"),
        ({"1.png": b"x", "1.jpg": b"x", "1.cls": b"1"}, "1': it has 2 images"),
        ({"1.png": b"x", "1.cls": b"-1"}, "label -1 is out of range"),
        ({"1.png": b"x", "1.cls": b"99999999999"}, "would make 100,000,000,000 classes"),
        ({"README": b"x"}, "no training images"),
    ],
)
def test_what_is_wrong_with_a_sample_is_told(tmp_path, members, said):
    write_tar(tmp_path / "s.tar", members)
    with pytest.raises(DataError, match=said) as raised:
        open_config(tmp_path / "s.tar")
    assert "\n" not in str(raised.value)


def test_a_shard_that_is_gone_is_told(tmp_path):
    write_tars(tmp_path / "tars")
    pattern = f"{tmp_path}/tars/train-{{000..006}}.tar"
    for look in (lambda: check_source(DataConfig(source=pattern)), lambda: open_config(pattern)):
        with pytest.raises(DataError, match=r"There is no shard '.*train-006.tar'"):
            look()
    with served(tmp_path / "tars") as address:
        with pytest.raises(DataError, match=r"There is no shard at '.*train-006.tar'"):
            open_config(f"{address}/train-{{000..006}}.tar")
        dataset = open_config(f"{address}/train-{{000..005}}.tar")
    shutil.rmtree(tmp_path / "cache" / "shards")
    stream = TrainingStream(reopened(dataset), Augment(), seed=0)
    for workers in (0, 1):  # in the middle of training, with its own sentence and without a traceback
        with pytest.raises(DataError, match=r"^'http.*tar' cannot be read|^There is no shard at 'http.*tar'") as raised:
            list(stream.batches([range(8)], workers))
        assert "\n" not in str(raised.value)


def test_a_local_shard_that_changes_is_told(tmp_path):
    dataset = reopened(open_config(write_tars(tmp_path / "tars")))
    (tmp_path / "tars" / "train-002.tar").write_bytes(b"other")
    with pytest.raises(DataError, match=r"train-002.tar' has changed since"):
        np.asarray(dataset.train.read(np.arange(66)))


def test_what_cannot_be_reached_or_read_is_one_sentence(tmp_path):
    write_tars(tmp_path / "both")
    write_parquets(tmp_path / "both")
    for source, said in {
        "foo://bucket/x.tar": "Protocol not known: foo",
        "s3://bucket/{0..9}.tar": "needs a package that is not installed: Install s3fs",
        "http://127.0.0.1:9/x.tar": "There is no shard at",
        f"{tmp_path}/both/train-000{{.tar,00.parquet}}": "tars and parquet files",
        f"{tmp_path}/both/train-00{{0,1,0}}.tar": "names .* twice",
        f"{tmp_path}/{{a,b}}.tar.gz": "There is no shard|is compressed",
        f"{tmp_path}/nothing-{{0..3}}": "There is no shard",
    }.items():
        with pytest.raises(DataError, match=said) as raised:
            open_config(source)
        assert "\n" not in str(raised.value)


def test_an_archive_beside_class_folders_is_no_shard(photo_folder):
    write_tars(photo_folder, shards=1)
    assert open_data(str(photo_folder)).classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["ETag", "LastModified", "last_modified", "mtime"])
def test_a_changed_file_is_known_by_whatever_its_system_tells(name, monkeypatch):
    class System:
        def __init__(self, version):
            self.version = version

        def info(self, path):
            return {"name": path, "size": 3, name: self.version}

    seen = []
    for version in ("first", "second"):
        monkeypatch.setattr("vitclinic.data.shards.names.open_system", lambda url, v=version: (System(v), "train.tar"))
        seen.append(look_at("cloud://train.tar"))
    assert [shard.version for shard in seen] == ["first", "second"]
    assert seen[0].key != seen[1].key


def test_folders_are_listed_wherever_they_are(tmp_path):
    write_tars(tmp_path / "tars", shards=2)
    with served(tmp_path) as address:
        assert list_shards(f"{address}/tars/") == [f"{address}/tars/train-{n:03}.tar" for n in range(2)]
    assert list_shards(str(tmp_path / "tars")) == [str(tmp_path / "tars" / f"train-{n:03}.tar") for n in range(2)]
