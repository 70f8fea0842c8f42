"""Detection data in parquet, in both layouts of the Hugging Face hub."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data import DataConfig, open_data

LISTS = [{"bbox": [[2.0, 1.0, 4.0, 6.0], [0.0, 0.0, 2.0, 2.0]], "category": [1, 0]}, {"bbox": [], "category": []}]
STRUCTS = [[{"bbox": box, "category": kind} for box, kind in zip(*row.values(), strict=True)] for row in LISTS]


def write(folder, objects, names=("cat", "dog"), name="objects"):
    stored = io.BytesIO()
    Image.new("RGB", (20, 16)).save(stored, "PNG")
    image = {"bytes": stored.getvalue(), "path": None}
    features = {name: {"feature": {"category": {"names": list(names)}}}} if names else {}
    table = pa.table({"image": [image] * len(objects), name: objects})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, folder / "train.parquet")
    return folder / "train.parquet"


def read(path, **options):
    return open_data(DataConfig(source=str(path), target="objects", held_out=0, **options), size=(16, 20))


@pytest.mark.parametrize("objects", [LISTS, STRUCTS])
def test_boxes_and_names_in_either_layout(objects, tmp_path):
    dataset = read(write(tmp_path, objects))
    assert dataset.classes == ("cat", "dog")
    first, second = (one.objects for one in dataset.train.annotate(np.arange(2)))
    assert first.boxes.tolist() == [[2, 1, 6, 7], [0, 0, 2, 2]]
    assert first.labels.tolist() == [1, 0]
    assert first.masks is None
    assert len(second) == 0


def test_categories_without_names_are_their_numbers_or_texts(tmp_path):
    assert read(write(tmp_path, LISTS, names=())).classes == ("0", "1")
    texts = [[{"bbox": [0.0, 0.0, 3.0, 3.0], "label": "owl"}], [{"bbox": [0.0, 0.0, 3.0, 3.0], "label": "cow"}]]
    assert read(write(tmp_path, texts, names=())).classes == ("cow", "owl")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"bbox": [1.0, 1.0, 0.0, 3.0], "category": 0}, "row 0: object 0 has a box without area"),
        ({"bbox": [1.0, 1.0], "category": 0}, "expected .x, y, width, height"),
        ({"bbox": [1.0, 1.0, 2.0, 3.0], "category": 7}, "of a category that has no name"),
    ],
)
def test_what_cannot_be_used_is_told_or_left_out_and_noted(entry, sentence, tmp_path):
    path = write(tmp_path, [[entry, {"bbox": [0.0, 0.0, 5.0, 5.0], "category": 1}]])
    with pytest.raises(DataError, match=sentence):
        read(path)
    dataset = read(path, on_error="skip")
    assert len(dataset.skipped) == 1
    assert len(dataset.train.annotate(np.arange(1))[0].objects) == 1


def test_without_the_column_or_objects(tmp_path):
    with pytest.raises(DataError, match="has no column 'objects'"):
        read(write(tmp_path, LISTS, name="things"))
    with pytest.raises(DataError, match="its objects have no category"):
        read(write(tmp_path, [[{"bbox": [0.0, 0.0, 5.0, 5.0], "kind": 1}]]))
    with pytest.raises(DataError, match="row 0: its objects are not complete"):
        read(write(tmp_path, [{"bbox": [[0.0, 0.0, 5.0, 5.0]], "category": [0, 1]}]))
