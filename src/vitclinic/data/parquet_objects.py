"""`data=FILE.parquet` for detection: images with a column `objects`, as detection sets of the Hugging Face hub have it.

`objects` is a struct of lists, or a list of structs, with `bbox` in COCO's x, y, width, height, `category` (or
`categories`, `label`, `labels`), numbers or names, and perhaps `iscrowd` (or `is_crowd`). Names of numbered categories
come from the `huggingface` metadata of the schema. What cannot be used is an error, or left out with `on_error: skip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint, read_json
from vitclinic.data.annotations.annotation import Objects
from vitclinic.data.folder import LeftOut
from vitclinic.data.parquet import TableRecords, files_by_split, find_image_column
from vitclinic.data.source import Source
from vitclinic.data.tables import read_table, stamp_files

COLUMN = "objects"
_CATEGORIES = ("category", "categories", "label", "labels", "category_id")
_CROWD = ("iscrowd", "is_crowd")


class ObjectTable(TableRecords):
    """Images in the bytes of an Arrow column, with their objects."""

    def __init__(self, source: str, images: pa.ChunkedArray, found: list[Objects]) -> None:
        super().__init__(source, images, np.zeros(len(found), np.int64))
        self.found = found

    def objects(self, index: int) -> Objects:
        """Return the objects of a row."""
        return self.found[index]

    def contents(self) -> list[Any]:
        described = [[each.boxes.tolist(), each.labels.tolist(), each.crowd.tolist()] for each in self.found]
        return [[length, fingerprint(of)] for length, of in zip(super().contents(), described, strict=True)]


def has_objects(table: pa.Table) -> bool:
    """Return True if a table has a column of objects."""
    return COLUMN in table.column_names


def open_parquet_objects(path: Path, on_error: str) -> Source:
    """Open a parquet file, or a folder of them, as a source of objects.

    Raises:
        DataError: There is no column of objects, or what it has cannot be used.
    """
    files, left_out = files_by_split(path), LeftOut(on_error == "skip")
    tables = {split: read_table(paths) for split, paths in files.items()}
    for split, table in tables.items():
        if not has_objects(table):
            raise DataError(f"'{path}' has no column '{COLUMN}' in its {split} files; it has {table.column_names}.")
    rows = {
        split: [_as_list(row, f"{path} {split} row {number}") for number, row in enumerate(table[COLUMN].to_pylist())]
        for split, table in tables.items()
    }
    names = _names(next(iter(tables.values())).schema)
    classes, code = _classes(rows, names, path)
    image = find_image_column(next(iter(tables.values())), path)
    splits = {}
    for split, table in tables.items():
        name = str(path if path.is_file() else files[split][0].parent / split)
        found = [_read(f"{name} row {row}", listed, code, left_out) for row, listed in enumerate(rows[split])]
        splits[split] = ObjectTable(name, table.column(image), found)
    known = {split: stamp_files(paths) for split, paths in files.items()}
    identity = fingerprint("parquet objects", known, on_error)
    return Source(str(path), (), splits, identity, notes=tuple(left_out.notes), targets={COLUMN: classes})


def _as_list(row: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects of a row one by one; a row without a value has none."""
    if isinstance(row, Mapping):
        lists = {key: values for key, values in row.items() if isinstance(values, list)}
        counts = {key: len(values) for key, values in lists.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{name}: its objects are not complete ({counts}).")
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return list(row or [])


def _names(schema: pa.Schema) -> list[str] | None:
    """Return the names of the categories in the metadata, wherever a version of the library has put them."""
    try:
        feature = read_json((schema.metadata or {})[b"huggingface"])["info"]["features"][COLUMN]
    except (KeyError, TypeError, ValueError):
        return None
    return _find_names(feature)


def _find_names(feature: Any) -> list[str] | None:
    if isinstance(feature, list):
        return next((found for each in feature if (found := _find_names(each))), None)
    if not isinstance(feature, dict):
        return None
    names = feature.get("names")
    if isinstance(names, list) and names:
        return [str(name) for name in names]
    return next((found for each in feature.values() if (found := _find_names(each))), None)


def _category(entry: Mapping[str, Any], path: Path) -> Any:
    for key in _CATEGORIES:
        if key in entry:
            return entry[key]
    raise DataError(f"'{path}': its objects have no category ({', '.join(_CATEGORIES)}); they have {list(entry)}.")


def _classes(
    rows: Mapping[str, list[list[dict[str, Any]]]], names: list[str] | None, path: Path
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return the names of the classes, and the label of each category."""
    found = {_category(each, path) for of_split in rows.values() for row in of_split for each in row}
    if not found:
        raise DataError(f"'{path}' has no objects.")
    if all(isinstance(category, int) for category in found):
        listed = names or [str(category) for category in range(max(found) + 1)]
        return tuple(listed), {number: number for number in range(len(listed))}
    listed = names or sorted(str(category) for category in found)
    return tuple(listed), {name: number for number, name in enumerate(listed)}


def _read(name: str, listed: list[dict[str, Any]], code: Mapping[Any, int], left_out: LeftOut) -> Objects:
    boxes, labels, crowd = [], [], []
    for number, each in enumerate(listed):
        box = each.get("bbox")
        label = code.get(next((each[key] for key in _CATEGORIES if key in each), None))
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(side, int | float) for side in box):
            left_out.add(f"{name}: object {number} has the box {box}; expected [x, y, width, height]", "fix it")
        elif not (box[2] > 0 and box[3] > 0):
            shown = ", ".join(f"{side:g}" for side in box)
            left_out.add(f"{name}: object {number} has a box without area ({shown}; x, y, width, height)", "fix it")
        elif label is None:
            left_out.add(f"{name}: object {number} is of a category that has no name", "fix it")
        else:
            boxes.append([box[0], box[1], box[0] + box[2], box[1] + box[3]])
            labels.append(label)
            crowd.append(any(bool(each.get(key)) for key in _CROWD))
    return Objects(np.array(boxes, np.float64).reshape(-1, 4), np.array(labels, np.int64), np.array(crowd, bool))
