import json
import os

import numpy as np
import pytest

import vitclinic.data.dataset as dataset_module
from vitclinic._core.errors import DataError
from vitclinic.data import cache, open_data


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder):
    return sorted(p for p in (folder / "images").iterdir() if not p.name.startswith("."))


def test_decoded_once(empty_cache, photo_folder, monkeypatch):
    first = open_data(str(photo_folder), size=16)
    monkeypatch.setattr(cache, "_decode_all", None)  # calling it again would raise
    second = open_data(str(photo_folder), size=16)
    assert first.digest == second.digest
    assert isinstance(second.train.images.images, np.memmap)


def test_a_changed_folder_is_decoded_again(empty_cache, photo_folder, picture):
    before = open_data(str(photo_folder), size=16)
    picture(999, (24, 24)).save(photo_folder / "cat" / "0.png")
    assert open_data(str(photo_folder), size=16).digest != before.digest


def test_the_digest_is_of_the_content_not_of_the_place(empty_cache, photo_folder):
    before = open_data(str(photo_folder), size=16)
    moved = photo_folder.rename(photo_folder.with_name("moved"))
    assert open_data(str(moved), size=16).digest == before.digest


def test_an_interrupted_build_leaves_nothing(empty_cache, photo_folder):
    def stop(what, done, total):
        if what == "decoding" and done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_data(str(photo_folder), size=16, progress=stop)
    assert list((empty_cache / "images").iterdir()) == []


def test_the_least_recently_used_entries_go_when_it_is_full(empty_cache, monkeypatch):
    open_data("digits", size=8)
    open_data("digits", size=16)
    old = entries(empty_cache)
    assert len(old) == 2
    for entry in old:
        os.utime(entry, (0, 0))
    (empty_cache / "images" / ".building-killed").mkdir()
    os.utime(empty_cache / "images" / ".building-killed", (0, 0))
    monkeypatch.setenv("VITCLINIC_CACHE_SIZE", "1M")
    open_data("digits", size=32)
    left = list((empty_cache / "images").iterdir())
    assert len(left) == 1  # what was just made stays, however large
    assert left[0] not in old


def test_a_size_that_is_none(monkeypatch):
    monkeypatch.setenv("VITCLINIC_CACHE_SIZE", "lots")
    with pytest.raises(DataError, match="such as 5G"):
        cache.cache_limit()


def test_a_cache_that_cannot_be_written(monkeypatch, photo_folder):
    monkeypatch.setenv("VITCLINIC_CACHE", str(photo_folder / "cat" / "1.png" / "cache"))
    with pytest.raises(DataError, match="VITCLINIC_CACHE"):
        open_data(str(photo_folder))


def test_streamed_and_cached_sets_show_evaluation_the_same(empty_cache, tmp_path, picture, monkeypatch):
    from vitclinic.data import evaluation_batches

    for name in ["a", "b"]:
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(6):
            picture(number, (130, 120)).resize((260, 240)).save(tmp_path / "set" / name / f"{number}.png")
    cached = next(evaluation_batches(open_data(str(tmp_path / "set"), size=96), "train", 100))
    monkeypatch.setattr(dataset_module, "SMALL_SET_BYTES", 0)
    streamed = next(evaluation_batches(open_data(str(tmp_path / "set"), size=96), "train", 100))
    assert cached.images.shape == (10, 3, 96, 96)
    assert (cached.images - streamed.images).abs().max() <= 1 / 255 + 1e-6
    assert cached.targets.equal(streamed.targets)


def _damage(entry, kind):
    images, record = entry / "images.bin", entry / "entry.json"
    if kind == "zeroed":
        images.write_bytes(bytes(images.stat().st_size))
    elif kind == "one bit":
        content = bytearray(images.read_bytes())
        content[len(content) // 2] ^= 1
        images.write_bytes(content)
    elif kind == "cut off":
        images.write_bytes(images.read_bytes()[:100])
    elif kind == "gone":
        images.unlink()
    elif kind == "kept":
        (entry / "kept.npy").write_bytes(b"?")
    else:
        record.write_bytes({"empty": b"", "list": b"[]", "shape": b'{"digest": "", "skipped": [], "shape": 3}'}[kind])


@pytest.mark.parametrize("kind", ["zeroed", "one bit", "cut off", "gone", "kept", "empty", "list", "shape"])
def test_a_damaged_entry_is_built_again(empty_cache, kind, caplog):
    before = open_data("digits")
    pixels = before.test.read(np.arange(5)).copy()
    _damage(entries(empty_cache)[0], kind)
    again = open_data("digits")
    assert again.digest == before.digest
    assert np.array_equal(again.test.read(np.arange(5)), pixels)
    assert "decoded again" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"size": 3}', b'{"size": ["a", 2], "channels": 3, "shorter_side": 1}']
)
def test_a_damaged_survey_is_made_again(empty_cache, photo_folder, content):
    before = open_data(str(photo_folder))
    for file in (empty_cache / "surveys").iterdir():
        file.write_bytes(content)
    assert open_data(str(photo_folder)).size == before.size


def test_a_survey_whose_size_was_changed_is_made_again(empty_cache, photo_folder, caplog):
    before = open_data(str(photo_folder))
    for file in (empty_cache / "surveys").iterdir():
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "size": [64, 64]}))
    assert open_data(str(photo_folder)).size == before.size
    assert "was changed since it was written" in caplog.text


@pytest.mark.parametrize("name", ["images.bin", "kept.npy", "entry.json"])
def test_an_entry_with_a_device_or_a_link_to_nowhere_is_built_again(empty_cache, name, caplog):
    for target in ("/dev/zero", "nowhere"):
        before = open_data("digits").digest
        file = entries(empty_cache)[0] / name
        file.unlink()
        file.symlink_to(target)
        assert open_data("digits").digest == before
        assert "decoded again" in caplog.text


@pytest.mark.parametrize("reason", [13, 28, 27])
def test_a_cache_of_which_nothing_can_be_used_is_one_sentence(empty_cache, monkeypatch, reason):
    def refuse(*places):
        raise OSError(reason, "no")

    monkeypatch.setattr(cache, "_open_intact", refuse)
    with pytest.raises(DataError, match=r"Cannot use the cache .* set VITCLINIC_CACHE"):
        open_data("digits")


def test_an_entry_is_on_disk_before_it_is_named(empty_cache, monkeypatch):
    events = []
    monkeypatch.setattr(cache, "sync", lambda path: events.append(path.name))
    publish = cache._publish
    monkeypatch.setattr(cache, "_publish", lambda *folders: (events.append("named"), publish(*folders)))
    open_data("digits")
    assert set(events[: events.index("named")]) == {"images.bin", "kept.npy", "entry.json"}
