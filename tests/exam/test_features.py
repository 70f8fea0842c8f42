"""`features`: the embeddings of images, with labels and paths, in memory and in a file."""

import os
import stat

import numpy as np
import pytest
import torch
from PIL import Image

import vitclinic
from tests.probes.subjects import vit
from vitclinic._core.errors import RecipeError, RunError


@pytest.fixture
def photos(tmp_path):
    for split, count in (("train", 4), ("val", 2), ("test", 2)):
        for name, shade in (("dark", 30), ("light", 200)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (16, 16), (shade + 5 * number, shade, shade)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_rows_are_images_with_their_own_labels_and_paths(photos, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    torch.manual_seed(0)
    network = vit().eval()
    found = vitclinic.features(network, photos, out=tmp_path / "f.parquet", batch_size=3)
    assert found.embeddings.shape == (16, 24)
    assert [found.splits.count(name) for name in ("train", "val", "test")] == [8, 4, 4]
    for path, split, label, row in zip(found.paths, found.splits, found.labels, found.embeddings, strict=True):
        assert f"/{split}/{found.classes[label]}/" in path
        x = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            expected = network.forward_head(network.forward_features(x), pre_logits=True)
        np.testing.assert_allclose(row, expected[0], atol=1e-5)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table.column_names == ["path", "split", "label", "class", "embedding"]
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), found.embeddings)
    assert table["class"].to_pylist() == [found.classes[label] for label in found.labels]
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_split_a_limit_a_loader_and_a_wrong_file(photos, tmp_path):
    found = vitclinic.features(vit(), photos, split="test", limit=2)
    assert found.splits == ("test", "test")
    assert sorted(found.labels) == [0, 1]
    loader = [(torch.rand(5, 3, 16, 16), torch.arange(5))]
    assert vitclinic.features(vit(), loader).embeddings.shape == (5, 24)
    with pytest.raises(RecipeError, match=r"ends in \.parquet"):
        vitclinic.features(vit(), photos, out=tmp_path / "f.csv")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_a_file_is_replaced(photos, tmp_path, kind):
    pytest.importorskip("pyarrow")
    path = tmp_path / "f.parquet"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    found = vitclinic.features(vit(), photos, split="test")
    for write in (lambda: found.write(path), lambda: vitclinic.features(vit(), photos, out=path)):
        with pytest.raises(RunError, match=r"it is a (device or a pipe|folder), not a file"):
            write()
    assert stat.S_ISFIFO(path.stat().st_mode) == (kind == "pipe")
    assert path.is_symlink() == (kind == "device")
