"""Queries and their gallery: folders, files and columns of them, and rankings against a search by hand."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import DataError
from vitclinic._core.neighbours import rank_leave_one_out
from vitclinic.data import DataConfig, open_data
from vitclinic.tasks import Retrieval

PARTS = {"train": ["ada", "bo"], "query": ["cy", "di"], "gallery": ["cy", "di", "ada"]}
IMAGES = {"train": 3, "query": 1, "gallery": 2}


def draw(number):
    """Return an image of 8 x 8 pixels as PNG."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)).save(file, "png")
    return file.getvalue()


def rows():
    """Yield (part, identity, camera, image)."""
    number = 0
    for part, identities in PARTS.items():
        for identity in identities:
            for place in range(IMAGES[part]):
                number += 1
                yield part, identity, place, draw(number)


def write_table(path, chosen):
    images = [{"bytes": image, "path": None} for *_, image in chosen]
    columns = {"image": images, "label": [row[1] for row in chosen], "camera": [row[2] for row in chosen]}
    pq.write_table(pa.table({**columns, "part": [row[0] for row in chosen]}), path)


@pytest.fixture(params=["folder", "files", "column"])
def config(request, tmp_path):
    if request.param == "folder":
        for number, (part, identity, _, image) in enumerate(rows()):
            (tmp_path / part / identity).mkdir(parents=True, exist_ok=True)
            (tmp_path / part / identity / f"{number:02}.png").write_bytes(image)
        return DataConfig(source=str(tmp_path), held_out=0)
    if request.param == "files":
        for part in PARTS:
            write_table(tmp_path / f"{part}.parquet", [row for row in rows() if row[0] == part])
        return DataConfig(source=str(tmp_path), held_out=0, group="camera")
    write_table(tmp_path / "all.parquet", list(rows()))
    return DataConfig(source=str(tmp_path / "all.parquet"), held_out=0, split_column="part", group="camera")


def test_queries_and_gallery_are_the_test_images(config):
    dataset = open_data(config)
    assert dataset.classes == ("ada", "bo", "cy", "di")
    assert [len(dataset.train), len(dataset.val), len(dataset.test)] == [6, 0, 8]
    test = dataset.test
    assert [dataset.classes[label] for label in test.labels[test.queries]] == ["cy", "di"]
    assert test.queries.sum() == 2
    assert test.take(np.array([0, 7])).queries.tolist() == [True, False]
    assert dataset.train.queries is None


def test_the_score_is_that_of_a_search_by_hand(config):
    dataset = open_data(config)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5))
    score = Retrieval().evaluate(network, dataset, "test", ALONE)
    test = dataset.test
    with torch.no_grad():
        pixels = torch.from_numpy(test.read(np.arange(len(test)))).permute(0, 3, 1, 2) / 255
        features = torch.nn.functional.normalize(network(pixels), dim=1)
    precisions, first = [], []
    for query in np.flatnonzero(test.queries):
        own = None if test.groups is None else test.groups[query]
        gallery = [
            i
            for i in np.flatnonzero(~test.queries)
            if not (test.groups is not None and test.labels[i] == test.labels[query] and test.groups[i] == own)
        ]
        gallery.sort(key=lambda i, query=query: -float(features[query] @ features[i]))
        hits = [rank for rank, i in enumerate(gallery, 1) if test.labels[i] == test.labels[query]]
        precisions.append(np.mean([(place + 1) / rank for place, rank in enumerate(hits)]))
        first.append(hits[0])
    assert score["count"] == 2
    assert score["map"] == pytest.approx(np.mean(precisions), abs=1e-9)
    assert score["rank1"] == np.mean([rank == 1 for rank in first])


def test_rankings_of_queries_are_those_of_a_loop():
    """Many random sets, with and without groups and re-ranking; re-ranked ones by the order of the whole matrix."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        features, labels = torch.from_numpy(random.normal(size=(30, 4))), torch.from_numpy(random.integers(0, 4, 30))
        groups, queries = torch.from_numpy(random.integers(0, 3, 30)), torch.from_numpy(random.random(30) < 0.4)
        found = rank_leave_one_out(features, labels, groups, False, queries)
        unit = torch.nn.functional.normalize(features, dim=1)
        expected = []
        for query in queries.nonzero()[:, 0].tolist():
            kept = [
                i
                for i in range(30)
                if not queries[i] and not (labels[i] == labels[query] and groups[i] == groups[query])
            ]
            kept.sort(key=lambda i, query=query: -float(unit[query] @ unit[i]))
            hits = [rank for rank, i in enumerate(kept, 1) if labels[i] == labels[query]]
            if hits:
                expected.append((np.mean([(n + 1) / rank for n, rank in enumerate(hits)]), hits[0]))
        assert found.average_precision.tolist() == pytest.approx([precision for precision, _ in expected])
        assert found.first_rank.tolist() == [rank for _, rank in expected]
        again = rank_leave_one_out(features, labels, groups, True, queries)
        assert len(again.first_rank) == len(expected)


def test_one_without_the_other_is_told(tmp_path):
    write_table(tmp_path / "all.parquet", [row for row in rows() if row[0] != "gallery"])
    with pytest.raises(DataError, match="has a query and no gallery"):
        open_data(DataConfig(source=str(tmp_path / "all.parquet"), split_column="part"))
    with pytest.raises(DataError, match=r"'camera' of .* has '0'"):
        open_data(DataConfig(source=str(tmp_path / "all.parquet"), split_column="camera"))
    for part in ("train", "query"):
        (tmp_path / "folder" / part / "ada").mkdir(parents=True)
        (tmp_path / "folder" / part / "ada" / "1.png").write_bytes(draw(1))
    with pytest.raises(DataError, match="not both of query and gallery"):
        open_data(DataConfig(source=str(tmp_path / "folder")))
