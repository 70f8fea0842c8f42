"""What users' folders hold: each thing is converted properly or gets one sentence that names the file."""

import os

import numpy as np
import pytest
from PIL import Image

import vitclinic.data.dataset as dataset_module
from vitclinic._core.errors import DataError
from vitclinic.data import DataConfig, open_data


def test_wrong_path_suggests_a_near_one(photo_folder):
    with pytest.raises(DataError, match="Did you mean 'photos'"):
        open_data(str(photo_folder.with_name("fotos")))


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="no images and no sub-folders"):
        open_data(str(tmp_path))


def test_images_without_class_folders(tmp_path, picture):
    picture().save(tmp_path / "a.png")
    with pytest.raises(DataError, match="1 images and no sub-folders"):
        open_data(str(tmp_path))


def test_a_plain_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="is a file"):
        open_data(str(tmp_path / "notes.txt"))


def test_class_with_no_image(photo_folder):
    (photo_folder / "emu").mkdir()
    with pytest.raises(DataError, match=r"emu' contains no images.*on_error=skip"):
        open_data(str(photo_folder))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"))
    assert data.classes == ("cat", "dog")
    assert "emu' contains no images" in data.skipped[0]


@pytest.mark.parametrize("inside", ["", "train", "test"])
def test_a_class_that_the_list_of_classes_lacks(tmp_path, picture, inside):
    for place in ["train/a", "train/b", "test/a", f"{inside}/emu"] if inside else ["a", "b", "emu"]:
        (tmp_path / place).mkdir(parents=True)
        picture().save(tmp_path / place / "1.png")
    (tmp_path / "classes.json").write_text('{"a": "A", "b": "B"}')
    with pytest.raises(DataError, match=r"emu' contains images, but '.*classes\.json' does not list it; add it"):
        open_data(str(tmp_path))
    data = open_data(DataConfig(source=str(tmp_path), on_error="skip"))
    assert data.classes == ("A", "B")
    assert "emu' contains images" in data.skipped[0]


def test_class_that_training_lacks(tmp_path, picture):
    for place in ["train/a", "test/a", "test/b"]:
        (tmp_path / place).mkdir(parents=True)
        picture().save(tmp_path / place / "1.png")
    with pytest.raises(DataError, match=r"'.*b' is a class of the test folder"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"not an image", "truncated"])
def test_unreadable_image(photo_folder, picture, content):
    bad = photo_folder / "cat" / "bad.png"
    if content == "truncated":
        picture(0, (64, 64)).save(bad)
        content = bad.read_bytes()[:2000]
    bad.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.png: not a readable image"):
        open_data(str(photo_folder))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"))
    assert len(data.skipped) == 1
    assert "bad.png" in data.skipped[0]
    assert sum(len(split) for split in data.splits.values()) == 40


def test_labels_stay_with_their_images_when_one_is_skipped(tmp_path):
    for name, colour in {"a": 0, "b": 255}.items():
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("L", (8, 8), colour).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "00bad.png").write_bytes(b"?")
    data = open_data(DataConfig(source=str(tmp_path), on_error="skip"))
    for split in data.splits.values():
        values = split.read(np.arange(len(split)))[:, 0, 0, 0]
        assert np.array_equal(values == 255, split.labels == 1)


def test_odd_images_are_converted(tmp_path, picture):
    (tmp_path / "odd").mkdir()
    odd = tmp_path / "odd"
    Image.new("RGB", (1, 1), "red").save(odd / "pixel.png")
    Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)).save(odd / "deep.png")
    picture(1).convert("CMYK").save(odd / "print.jpg")
    picture(2, mode="L").save(odd / "grey.png")
    picture(3).convert("RGBA").save(odd / "clear.png")
    picture(4).convert("P").save(odd / "palette.gif")
    picture(5).save(odd / "no-case.JPG")
    data = open_data(str(tmp_path))
    assert sum(len(split) for split in data.splits.values()) == 7
    assert data.channels == 3


def test_hidden_and_foreign_files_are_passed_over(photo_folder):
    (photo_folder / ".git").mkdir()
    (photo_folder / "cat" / ".hidden.png").write_bytes(b"?")
    (photo_folder / "cat" / "Thumbs.db").write_bytes(b"?")
    assert sum(len(s) for s in open_data(str(photo_folder)).splits.values()) == 40


def test_one_image(tmp_path, picture):
    (tmp_path / "only").mkdir()
    picture().save(tmp_path / "only" / "1.png")
    data = open_data(str(tmp_path))
    assert {split: len(images) for split, images in data.splits.items()} == {"train": 1, "val": 0, "test": 0}


def test_streamed_sets_name_and_skip_unreadable_images(photo_folder, monkeypatch):
    monkeypatch.setattr(dataset_module, "SMALL_SET_BYTES", 0)
    (photo_folder / "cat" / "0.png").write_bytes(b"broken")
    plain = open_data(str(photo_folder), size=32)
    holder = next(split for split in plain.splits.values() if 0 in split.rows)
    with pytest.raises(DataError, match=r"0\.png: not a readable image"):
        list(holder.read(np.arange(len(holder))))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"), size=32)
    assert len(data.skipped) == 1
    assert "0.png" in data.skipped[0]
    assert sum(len(list(split.read(np.arange(len(split))))) for split in data.splits.values()) == 39
    cached = _cached(photo_folder, monkeypatch)
    for name, split in data.splits.items():
        assert np.array_equal(split.rows, cached.splits[name].rows)
        assert np.array_equal(split.labels, cached.splits[name].labels)
        assert np.array_equal(
            np.stack(list(split.read(np.arange(len(split))))), cached.splits[name].read(np.arange(len(split)))
        )


def _cached(folder, monkeypatch):
    monkeypatch.setattr(dataset_module, "SMALL_SET_BYTES", 2**30)
    return open_data(DataConfig(source=str(folder), on_error="skip"), size=32)


def test_streamed_sets_notice_that_a_file_has_changed(photo_folder, picture, monkeypatch):
    monkeypatch.setattr(dataset_module, "SMALL_SET_BYTES", 0)
    before = open_data(str(photo_folder)).digest
    picture(5, (90, 90)).save(photo_folder / "cat" / "0.png")
    assert open_data(str(photo_folder)).digest != before


def test_links_in_a_circle_and_links_to_nowhere(photo_folder):
    (photo_folder / "cat" / "again").symlink_to(photo_folder / "cat")
    assert sum(len(s) for s in open_data(str(photo_folder)).splits.values()) == 40
    (photo_folder / "cat" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"gone\.png: not a readable image"):
        open_data(str(photo_folder))
    assert len(open_data(DataConfig(source=str(photo_folder), on_error="skip")).skipped) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/dev/null", "a device or a pipe"),
        ("~nobody-of-this-name", "no such user"),
        ("x" * 5000, "name too long"),
        ("a\0b", "null"),
        ("shapes:n=300,n=400", "two values of n"),
        ("shapes:300,n=400", "two values of n"),
        ("shapes:99999999999", "from 1 to 10,000,000"),
        ("shapes:" + "9" * 400, "cannot parse"),
        ("shapes:texture=.", "cannot parse"),
    ],
)
def test_a_source_that_is_none(source, message):
    with pytest.raises(DataError, match=message):
        open_data(source)


def test_a_path_that_may_not_be_looked_at(photo_folder, monkeypatch):
    from pathlib import Path

    def refuse(self, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DataError, match="permission denied"):
        open_data(str(photo_folder))


def test_a_class_folder_that_may_not_be_read(photo_folder, monkeypatch):
    import os

    scan = os.scandir

    def refuse(path="."):
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cat' contains no images"):
        open_data(str(photo_folder))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"))
    assert data.classes == ("dog",)
    assert "cat' contains no images" in data.skipped[0]


def test_images_that_nothing_decodes_are_told(photo_folder):
    (photo_folder / "cat" / "phone.HEIC").write_bytes(b"?")
    with pytest.raises(DataError, match=r"phone\.HEIC' is an image that cannot be decoded"):
        open_data(str(photo_folder))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"))
    assert "phone.HEIC" in data.skipped[0]


def _divided(folder, picture, *names):
    for name in names:
        for label in "ab":
            (folder / name / label).mkdir(parents=True)
            picture().save(folder / name / label / "1.png")


@pytest.mark.parametrize("names", [("train", "val", "validation"), ("train", "Train"), ("train", "test", "Testing")])
def test_two_folders_of_one_split(tmp_path, picture, names):
    _divided(tmp_path, picture, *names)
    with pytest.raises(DataError, match=r"has two \w+ folders"):
        open_data(str(tmp_path))


def test_an_empty_val_folder(tmp_path, picture):
    _divided(tmp_path, picture, "train")
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match=r"val' contains no images; .*delete the folder"):
        open_data(str(tmp_path))
    data = open_data(DataConfig(source=str(tmp_path), on_error="skip"))
    assert "val' contains no images" in data.skipped[0]


@pytest.mark.parametrize(("link", "target"), [("a", ".."), ("aa", "cat"), ("dog/inner", "../cat")])
def test_a_link_that_gives_images_a_second_label(photo_folder, link, target):
    (photo_folder / link).symlink_to(target if target != ".." else photo_folder)
    with pytest.raises(DataError, match="belongs to two classes"):
        open_data(str(photo_folder))


def test_a_pipe_with_the_name_of_an_image(photo_folder):
    import os

    os.mkfifo(photo_folder / "cat" / "pipe.png")
    with pytest.raises(DataError, match=r"pipe\.png: not a readable image \(it is not a regular file\)"):
        open_data(str(photo_folder))


def _parquet(folder, name="train", labels=(0, 1), kind=None, column="label", metadata=None):
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    files = []
    for label in range(len(labels)):
        file = io.BytesIO()
        Image.new("L", (8, 8), 50 * label).save(file, "PNG")
        files.append(file.getvalue())
    images = pa.StructArray.from_arrays([pa.array(files, pa.binary())], ["bytes"])
    table = pa.table({"image": images, column: labels if kind is None else pa.array(labels, kind)})
    pq.write_table(table.replace_schema_metadata(metadata or {}), folder / f"{name}.parquet")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"labels": (0, 10**9)}], "label 1000000000 would make 1,000,000,001 classes"),
        ([{}, {"name": "test", "column": "other"}], "no column 'label' in its test files"),
        ([{}, {"name": "test", "labels": ("a", "b")}], "integers in some files and strings in others"),
        ([{"labels": (0.5, 1.5)}], "contains double; expected integers or strings"),
        ([{"labels": ([0], [1])}], "expected integers or strings"),
        ([{"labels": (2**64 - 1, 0), "kind": "uint64"}], "cannot be read"),
    ],
)
def test_parquet_labels_that_cannot_be_used(tmp_path, tables, message):
    for table in tables:
        _parquet(tmp_path, **table)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path))


def test_a_folder_named_like_a_table(tmp_path):
    (tmp_path / "table.parquet").mkdir()
    with pytest.raises(DataError, match="is a folder without parquet files"):
        open_data(str(tmp_path / "table.parquet"))


def test_parquet_labels_as_pandas_writes_them(tmp_path):
    import pyarrow as pa

    category = pa.array(["cat", "dog"]).dictionary_encode()
    for number, labels in enumerate([category, pa.array(["cat", "dog"], pa.large_string())]):
        folder = tmp_path / str(number)
        folder.mkdir()
        _parquet(folder, labels=labels)
        assert open_data(str(folder)).classes == ("cat", "dog")


@pytest.mark.parametrize("names", ["5", '"ab"', "null", "[]", "{}"])
def test_class_names_that_are_none(tmp_path, names):
    features = '{"info": {"features": {"label": {"names": NAMES}}}}'.replace("NAMES", names)
    _parquet(tmp_path, metadata={"huggingface": features})
    assert open_data(str(tmp_path)).classes == ("0", "1")


def test_a_folder_around_a_train_folder_has_the_classes_of_the_train_folder(photo_folder, tmp_path):
    (tmp_path / "wrap").mkdir()
    photo_folder.rename(tmp_path / "wrap" / "train")
    assert open_data(str(tmp_path / "wrap")).classes == ("cat", "dog")


def test_a_class_that_cannot_be_listed_is_noted_and_leaves_one(photo_folder, monkeypatch):
    """As for an ordinary user without the right to list it; what `train` says of one class is in test_damage."""
    closed, listing = str(photo_folder / "dog"), os.scandir

    def refuse(path="."):
        if os.fspath(path) == closed:
            raise PermissionError(13, "Permission denied", closed)
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="dog"):
        open_data(str(photo_folder))
    data = open_data(DataConfig(source=str(photo_folder), on_error="skip"))
    assert data.classes == ("cat",)
    assert any("dog" in note for note in data.skipped)
