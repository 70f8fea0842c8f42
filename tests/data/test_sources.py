"""Every kind of `data=`, on small sets made here."""

import errno
import hashlib
import io
import json
import os
import struct
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitclinic._core.errors import DataError, MissingExtraError
from vitclinic.data import DataConfig, open_data
from vitclinic.data.corruptions.copies import corrupt_data
from vitclinic.data.described import describe_data
from vitclinic.data.named import open_digits


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path, images, labels, names=None):
    table = pa.table({"image": [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)], "label": labels})
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


def test_folder_of_classes(photo_folder):
    data = open_data(str(photo_folder))
    assert data.classes == ("cat", "dog")
    assert {split: len(images) for split, images in data.splits.items()} == {"train": 32, "val": 4, "test": 4}
    assert data.size == (32, 32)  # sizes vary about 24: the smallest size that varied images are brought to
    assert data.channels == 3


@pytest.mark.parametrize(
    ("sizes", "side"),
    [([(40, 40)], 40), ([(300, 260)], 224), ([(100, 90), (120, 95)], 80), ([(900, 500), (500, 700)], 224)],
)
def test_the_size_comes_from_the_images(tmp_path, picture, sizes, side):
    (tmp_path / "a").mkdir()
    for number, size in enumerate(sizes):
        picture(number, size).save(tmp_path / "a" / f"{number}.png")
    assert open_data(str(tmp_path)).size == (side, side)


def test_folder_with_splits(tmp_path, picture):
    for split, count in {"train": 6, "validation": 2, "test": 3}.items():
        for name in ["a", "b"]:
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                picture(number, (8, 8)).save(tmp_path / split / name / f"{number}.bmp")
    data = open_data(str(tmp_path))
    assert {split: len(images) for split, images in data.splits.items()} == {"train": 12, "val": 4, "test": 6}
    assert data.size == (8, 8)


def test_pixels_and_labels_arrive_unchanged(tmp_path, picture):
    for name in ["a", "b"]:
        (tmp_path / name).mkdir()
        for number in range(10):
            picture(number + 50 * (name == "b"), (8, 8)).save(tmp_path / name / f"{number}.png")
    data = open_data(str(tmp_path))
    for split in data.splits.values():
        for index in range(len(split)):
            path = sorted(tmp_path.glob("*/*.png"), key=str)[split.rows[index]]
            stored = split.read(np.array([index]))[0]
            assert np.array_equal(stored, np.asarray(Image.open(path)))
            assert data.classes[split.labels[index]] == path.parent.name


def test_parquet_with_class_names(tmp_path, picture):
    images = [png(picture(i, (8, 8))) for i in range(30)]
    write_parquet(tmp_path / "train.parquet", images, [i % 3 for i in range(30)], ["x", "y", "z"])
    write_parquet(tmp_path / "test.parquet", images[:6], [i % 3 for i in range(6)], ["x", "y", "z"])
    data = open_data(str(tmp_path))
    assert data.classes == ("x", "y", "z")
    assert len(data.test) == 6
    assert len(data.train) + len(data.val) == 30


def test_parquet_with_string_labels(tmp_path, picture):
    images = [png(picture(i, (8, 8), "L")) for i in range(20)]
    write_parquet(tmp_path / "all.parquet", images, ["hen", "cow"] * 10)
    data = open_data(str(tmp_path / "all.parquet"))
    assert data.classes == ("cow", "hen")
    assert data.channels == 1


def test_large_parquet_is_read_through_a_memory_mapped_copy(tmp_path, picture, monkeypatch):
    from vitclinic.data import parquet, tables

    images = [png(picture(i, (8, 8))) for i in range(30)]
    write_parquet(tmp_path / "train.parquet", images, [i % 3 for i in range(30)], ["x", "y", "z"])
    small = open_data(str(tmp_path))
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 0)
    mapped = parquet.open_parquet(tmp_path)
    assert mapped.classes == small.classes
    assert mapped.splits["train"].labels.tolist() == [i % 3 for i in range(30)]
    assert np.array_equal(np.asarray(mapped.splits["train"].read(7)), np.asarray(picture(7, (8, 8))))


@pytest.fixture
def mapped(tmp_path, picture, monkeypatch):
    """A table that is read through its copy in the cache, and that copy."""
    from vitclinic.data import parquet, tables

    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 0)
    (tmp_path / "data").mkdir()
    images = [png(picture(i, (8, 8))) for i in range(30)]
    write_parquet(tmp_path / "data" / "train.parquet", images, [i % 3 for i in range(30)], ["x", "y", "z"])

    def labels():
        return parquet.open_parquet(tmp_path / "data").splits["train"].labels.tolist()

    assert labels() == [i % 3 for i in range(30)]
    (copy,) = (tmp_path / "cache" / "tables").glob("*.arrow")
    return copy, labels


@pytest.mark.parametrize("damage", ["labels", "cut", "empty", "vouched for by nothing", "pipe"])
def test_a_damaged_copy_of_a_table_is_made_again(mapped, damage, ends_soon):
    copy, labels = mapped
    content = copy.read_bytes()
    if damage == "labels":
        plain = np.array([i % 3 for i in range(30)], np.int64).tobytes()
        assert content.count(plain) == 1
        copy.write_bytes(content.replace(plain, bytes(len(plain))))
    elif damage == "pipe":
        copy.unlink()
        os.mkfifo(copy)
    elif damage == "vouched for by nothing":  # as an earlier version left it
        copy.with_suffix(".json").unlink()
    else:
        copy.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    assert labels() == [i % 3 for i in range(30)]
    assert copy.read_bytes() == content
    assert len(list(copy.parent.iterdir())) == 2


def test_a_copy_of_a_table_that_cannot_be_written_is_a_sentence(mapped, monkeypatch):
    from vitclinic.data import tables

    copy, labels = mapped
    copy.unlink()

    def refuse(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tables, "_copy_as_arrow", refuse)
    with pytest.raises(DataError, match=r"Cannot use the cache .*No space left"):
        labels()


def test_two_names_of_one_split_are_an_error_and_others_are_told(tmp_path, picture, caplog):
    images = [png(picture(i, (8, 8))) for i in range(6)]
    for name in ("train-0", "train-1", "val-0", "extra"):
        write_parquet(tmp_path / f"{name}.parquet", images, [0, 1] * 3, ["x", "y"])
    assert len(open_data(DataConfig(source=str(tmp_path), held_out=0)).train) == 12
    assert "left out extra.parquet" in caplog.text
    write_parquet(tmp_path / "validation-0.parquet", images, [0, 1] * 3, ["x", "y"])
    with pytest.raises(DataError, match=r"two names of its val split, 'val-0\.parquet' and 'validation-0\.parquet'"):
        open_data(str(tmp_path))


def test_deep_metadata_of_parquet_names_no_classes(tmp_path, picture):
    images = [png(picture(i, (8, 8))) for i in range(6)]
    write_parquet(tmp_path / "p.parquet", images, [0, 1] * 3, ["x", "y"])
    table = pq.read_table(tmp_path / "p.parquet")
    pq.write_table(table.replace_schema_metadata({"huggingface": "[" * 200_000}), tmp_path / "p.parquet")
    assert open_data(str(tmp_path / "p.parquet")).classes == ("0", "1")


def test_parquet_label_out_of_range_names_the_row(tmp_path, picture):
    images = [png(picture(i, (8, 8))) for i in range(4)]
    write_parquet(tmp_path / "p.parquet", images, [0, 1, 5, 1], ["x", "y"])
    with pytest.raises(DataError, match=r"row 2.*label 5 is out of range for 2 classes"):
        open_data(str(tmp_path / "p.parquet"))


def test_parquet_without_images(tmp_path):
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="no image column"):
        open_data(str(tmp_path / "p.parquet"))


def test_torchvision_set_on_disk(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, count in {"train": 40, "t10k": 10}.items():
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    data = open_data(f"torchvision:MNIST@{tmp_path}")
    assert (data.channels, data.size, len(data.classes), len(data.test)) == (1, (28, 28), 10, 10)
    assert np.array_equal(data.test.read(np.array([9]))[0, :, :, 0], images[9])


def test_torchvision_set_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot find CIFAR10"):
        open_data(f"torchvision:CIFAR10@{tmp_path}")
    with pytest.raises(DataError, match="Did you mean 'CIFAR10'"):
        open_data(f"torchvision:CIFAR11@{tmp_path}")


def test_a_torchvision_set_whose_training_images_are_called_trainval(tmp_path):
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for split in ("trainval", "test"):
        names = [f"{kind}_{split}{i}" for kind in ("Beagle", "Sphynx") for i in range(10)]
        for name in names:
            Image.new("RGB", (40, 40)).save(folder / "images" / f"{name}.jpg")
        lines = [f"{name} {1 + name.startswith('S')} 1 1" for name in names]
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines))
    data = open_data(f"torchvision:OxfordIIITPet@{tmp_path}")
    assert data.classes == ("Beagle", "Sphynx")
    assert len(data.test) == 20


def test_hugging_face_set(tmp_path, picture):
    datasets = pytest.importorskip("datasets")
    for name in ["a", "b"]:
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(10):
            picture(number, (8, 8)).save(tmp_path / "train" / name / f"{number}.png")
    datasets.disable_progress_bars()
    data = open_data(f"hf:{tmp_path}")
    assert data.classes == ("a", "b")
    assert sum(len(split) for split in data.splits.values()) == 20


def test_digits_are_the_real_ones():
    data = open_data("digits")
    assert (data.size, data.channels, len(data.classes)) == ((8, 8), 1, 10)
    assert sum(len(split) for split in data.splits.values()) == 1797
    records = open_digits().splits["train"]
    found = hashlib.sha256(records.images.tobytes() + records.labels.tobytes()).hexdigest()
    assert found.startswith("0b7e9c3202d7bcd255d6a19a238d3743bf5e320b")  # of what scikit-learn's load_digits() gives


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vitclinic\[parquet\]'"):
        open_data(str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"unlike png"):
        corrupt_data("shapes:20", tmp_path / "copies")


def test_shapes_of_any_size_are_prefixes_of_each_other():
    small, large = open_data("shapes:30"), open_data("shapes:50")
    rows = np.arange(30)
    assert np.array_equal(small.train.read(rows), large.train.read(rows))
    assert small.digest != large.digest
    other = open_data(DataConfig(source="shapes:30", split_seed=1))
    assert not np.array_equal(small.train.read(rows), other.train.read(rows))


def test_shapes_options_that_make_no_sense():
    for wrong in ["shapes:many", "shapes:0", "shapes:texture=2"]:
        with pytest.raises(DataError, match="shapes"):
            open_data(wrong)


@pytest.mark.parametrize("change", [{"limit": 100}, {"fraction": 100 / 1437}])
def test_subsets_limit_training_images_only(change):
    data = open_data(DataConfig(source="digits", **change))
    assert len(data.train) == 100
    assert len(data.test) == 180
    assert np.bincount(data.train.labels).min() >= 9


def test_asking_for_too_many_images():
    with pytest.raises(DataError, match=r"data.limit is 9999, but there are only 1437 training images"):
        open_data(DataConfig(source="digits", limit=9999))


def test_size_and_channels_can_be_asked_for():
    data = open_data("digits", size=16, channels=3)
    assert data.train.read(np.arange(2)).shape == (2, 16, 16, 3)


@pytest.mark.parametrize("options", [{}, {"limit": 20}, {"fraction": 0.5, "held_out": 0.2}, {"held_out": 0.0}])
def test_a_described_data_set_is_the_opened_one_without_pixels(photo_folder, options):
    config = DataConfig(source=str(photo_folder), **options)
    opened, described = open_data(config, size=48, channels=1), describe_data(config, size=48, channels=1)
    assert (described.name, described.classes, described.spec) == (opened.name, opened.classes, opened.spec)
    for split, images in opened.splits.items():
        assert np.array_equal(described.splits[split].rows, images.rows)
        assert np.array_equal(described.splits[split].labels, images.labels)
    with pytest.raises(DataError, match="were described, not decoded"):
        described.train.read(np.array([0]))


def test_published_sets_are_known_by_name_unless_a_folder_has_it(tmp_path, monkeypatch, picture):
    monkeypatch.chdir(tmp_path)
    cifar = describe_data(DataConfig(source="cifar100", fraction=0.1))
    assert {split: len(images) for split, images in cifar.splits.items()} == {"train": 4500, "val": 5000, "test": 10000}
    assert np.bincount(cifar.train.labels).tolist() == [45] * 100
    with pytest.raises(DataError, match=r"^CIFAR-100 does not come with vitclinic, and there is no folder 'cifar100'"):
        open_data("cifar100")
    for label in "ab":
        (tmp_path / "cifar100" / label).mkdir(parents=True)
        picture(0, (8, 8)).save(tmp_path / "cifar100" / label / "0.png")
    assert describe_data(DataConfig(source="cifar100")).classes == open_data("cifar100").classes == ("a", "b")


def test_columns_of_parquet_group_images_and_hold_out_whole_values(tmp_path, picture):
    images = [png(picture(i, (8, 8))) for i in range(60)]
    path = tmp_path / "all.parquet"
    write_parquet(path, images, [i // 5 for i in range(60)])
    camera, site = [i % 5 for i in range(60)], [f"site {i // 10}" for i in range(60)]
    table = pq.read_table(path).append_column("camera", pa.array(camera)).append_column("site", pa.array(site))
    pq.write_table(table, path)
    data = open_data(DataConfig(source=str(path), group="camera", split_by="site", held_out=0.15))
    seen = {split: {site[row] for row in part.rows} for split, part in data.splits.items()}
    assert [len(values) for values in seen.values()] == [1, 1, 4]
    assert len(set.union(*seen.values())) == 6
    assert all(part.groups.tolist() == [camera[row] for row in part.rows] for part in data.splits.values())
    assert data.train.take(np.array([3, 1])).groups.tolist() == data.train.groups[[3, 1]].tolist()
    by_label = open_data(DataConfig(source=str(path), split_by="label"))
    assert not set(by_label.train.labels) & set(by_label.test.labels)
    with pytest.raises(DataError, match="has no column 'drawer' \\(camera, site\\)"):
        open_data(DataConfig(source=str(path), group="drawer"))
