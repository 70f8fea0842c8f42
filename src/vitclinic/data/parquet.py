"""`data=FILE.parquet` or a folder of parquet files, in the format of the Hugging Face hub.

The image column is a struct of `bytes` and `path`, the label column holds integers (or strings); class names come from
the `huggingface` metadata of the schema if it has them. A folder's files are assigned to splits by their names:
`train.parquet`, `test-00000-of-00002.parquet`; without a training file the set can only be examined. Files or rows of
`query` and `gallery` are together the test split of a set for retrieval.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint, read_json
from vitclinic.data.annotations.annotation import Question
from vitclinic.data.folder import SPLIT_NAMES
from vitclinic.data.source import ROLES, SPLITS, NumberedRecords, Source
from vitclinic.data.tables import read_table, stamp_files

log = logging.getLogger(__name__)

_MOST_CLASSES = 1_000_000
_LABELS = ("label", "labels", "fine_label", "class", "target")


class TableRecords(NumberedRecords):
    """Images in the bytes of an Arrow column, one label each."""

    def __init__(
        self,
        source: str,
        images: pa.ChunkedArray,
        labels: np.ndarray[Any, Any],
        columns: dict[str, NDArray[np.int64]] | None = None,
        column_values: dict[str, NDArray[np.str_]] | None = None,
    ) -> None:
        super().__init__(source, labels)
        self.images = images
        self.columns = columns or {}
        self.column_values = column_values or {}

    def name(self, index: int) -> str:
        image = self.images[index]
        path = image["path"].as_py() if image.is_valid and "path" in image.type.names else None
        return f"{self.source} row {index}" + (f" ({path})" if path else "")

    def read(self, index: int) -> Image.Image:
        record = self.images[index].as_py()
        if not record or record.get("bytes") is None:
            raise OSError("the row contains no image bytes")
        return Image.open(io.BytesIO(record["bytes"]))

    def contents(self) -> list[Any]:
        lengths = [pc.binary_length(pc.struct_field(chunk, "bytes")) for chunk in self.images.chunks]
        return [length for chunk in lengths for length in chunk.to_pylist()]


class AskedRows(TableRecords):
    """Images in some rows of a table, with the questions of all rows that have the same image."""

    def __init__(
        self, source: str, images: pa.ChunkedArray, rows: Sequence[int], questions: Sequence[tuple[Question, ...]]
    ) -> None:
        super().__init__(source, images, np.zeros(len(rows), np.int64))
        self._rows, self._questions = rows, questions

    def name(self, index: int) -> str:
        return super().name(self._rows[index])

    def read(self, index: int) -> Image.Image:
        return super().read(self._rows[index])

    def contents(self) -> list[int]:
        lengths = super().contents()
        return [lengths[row] for row in self._rows]

    def questions(self, index: int) -> tuple[Question, ...]:
        """Return the questions about an image."""
        return self._questions[index]


def open_parquet(path: Path, split_column: str | None = None) -> Source:
    """Open a parquet file, or a folder of them, as a source; `split_column` names the column that has splits."""
    files = files_by_split(path, (*SPLITS, *ROLES))
    tables = {split: read_table(paths) for split, paths in files.items()}
    if split_column is not None:
        tables = _divide(pa.concat_tables(tables.values()), split_column, path)
    tables, queries = _join_queries(tables, path)
    first = next(iter(tables.values()))
    image_column = find_image_column(first, path)
    label_column = _label_column(first, path)
    for split, table in tables.items():
        missing = {image_column, label_column}.difference(table.column_names)
        if missing:
            raise DataError(f"'{path}' has no column '{missing.pop()}' in its {split} files, unlike in the first ones.")
    tables = {split: _with_plain_labels(table, label_column, path) for split, table in tables.items()}
    classes, code = _classes(tables, label_column, path)
    columns, values = _code_columns(tables, {image_column, label_column})
    splits = {
        split: TableRecords(
            str(path if path.is_file() else path / split),
            table.column(image_column),
            _codes(table.column(label_column), code, path),
            columns[split],
            values,
        )
        for split, table in tables.items()
    }
    stamps = {split: stamp_files(paths) for split, paths in files.items()}
    identity = ("parquet", stamps) if split_column is None else ("parquet", stamps, split_column)
    return Source(str(path), classes, splits, fingerprint(*identity), queries=queries)


def _divide(table: pa.Table, column: str, path: Path) -> dict[str, pa.Table]:
    """Return the rows of each split that a column names."""
    if column not in table.column_names:
        raise DataError(f"'data.split_column': '{path}' has no column '{column}'; it has {table.column_names}.")
    names, known = table.column(column).to_pylist(), (*SPLITS, *ROLES)
    if other := sorted({str(name) for name in names}.difference(known)):
        raise DataError(
            f"'data.split_column': '{column}' of '{path}' has '{other[0]}'; write {', '.join(known)} for each row."
        )
    rows = {split: np.flatnonzero([name == split for name in names]) for split in known}
    return {split: table.take(of_split) for split, of_split in rows.items() if len(of_split)}


def _join_queries(tables: dict[str, pa.Table], path: Path) -> tuple[dict[str, pa.Table], NDArray[np.bool_] | None]:
    """Return the tables with queries and gallery as the test split, and which of its rows are queries."""
    found = [role for role in ROLES if role in tables]
    if not found:
        return tables, None
    if len(found) < len(ROLES) or "test" in tables:
        missing = next((role for role in ROLES if role not in found), None)
        other = "a test split as well" if missing is None else f"no {missing}"
        raise DataError(f"'{path}' has a {found[0]} and {other}; queries and their gallery are the test images.")
    query, gallery = (tables[role] for role in ROLES)
    rest = {split: table for split, table in tables.items() if split not in ROLES}
    return {**rest, "test": pa.concat_tables([query, gallery])}, np.arange(len(query) + len(gallery)) < len(query)


def read_labels(file: BinaryIO, path: Path) -> tuple[list[Any], list[str] | None]:
    """Return the labels of a parquet file, integers or strings or None, and the names of the classes if it has them.

    Only the column of the labels is read.

    Raises:
        DataError: It has no images, no labels, or labels of another kind.
    """
    with pq.ParquetFile(file) as table:
        schema = table.schema_arrow
        find_image_column(schema.empty_table(), path)
        column = _label_column(schema.empty_table(), path)
        labels = _with_plain_labels(table.read([column]), column, path).column(column).to_pylist()
    return labels, _names_in_metadata(schema, column)


def copy_images(path: Path, target: Path) -> None:
    """Copy the images of a parquet file: their number, where each begins and the last one ends, their bytes."""
    with pq.ParquetFile(path) as table, target.open("wb") as file:
        column = find_image_column(table.schema_arrow.empty_table(), path)
        places = np.zeros(table.metadata.num_rows + 1, np.int64)
        file.seek(8 + places.nbytes)
        places[0], row = file.tell(), 0
        for batch in table.iter_batches(batch_size=64, columns=[column]):
            for image in batch.column(0).to_pylist():
                file.write((image or {}).get("bytes") or b"")
                row += 1
                places[row] = file.tell()
        file.seek(0)
        file.write((len(places) - 1).to_bytes(8, "little") + places.tobytes())


def files_by_split(path: Path, splits: Sequence[str] = SPLITS) -> dict[str, list[Path]]:
    """Return the files of each split, by how their names begin; files that no split names are reported.

    Raises:
        DataError: There are none, or two names of one split, such as val and validation.
    """
    if path.is_file():
        return {"train": [path]}
    listed = sorted(path.glob("*.parquet"))
    if not listed:
        raise DataError(f"'{path}' is a folder without parquet files.")
    found: dict[str, list[Path]] = {}
    for file in listed:
        split = next((split for split in splits if file.stem.lower().startswith(split)), None)
        if split:
            found.setdefault(split, []).append(file)
    if not found:
        return {"train": listed}
    for split, files in found.items():
        _refuse_two_names(path, split, files)
    if unnamed := [file.name for file in listed if not any(file in files for files in found.values())]:
        log.warning("'%s': left out %s: the names say no split.", path, ", ".join(unnamed))
    return {split: found[split] for split in splits if split in found}


def _refuse_two_names(path: Path, split: str, files: Sequence[Path]) -> None:
    """Raise for files such as val-0 and validation-0, which are two copies of a split more often than two parts."""
    words = {re.sub("[^a-z].*", "", file.stem.lower()): file.name for file in files}
    named = [words[word] for word in words if SPLIT_NAMES.get(word) == split]
    if len(named) > 1:
        raise DataError(f"'{path}' has two names of its {split} split, '{named[0]}' and '{named[1]}'; keep one.")


def find_image_column(table: pa.Table, path: Path) -> str:
    """Return the name of the column that has images.

    Raises:
        DataError: There is none.
    """
    for field in table.schema:
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            return str(field.name)
    raise DataError(f"'{path}' has no image column (a struct with 'bytes'); it has {table.column_names}.")


def _label_column(table: pa.Table, path: Path) -> str:
    for name in _LABELS:
        if name in table.column_names:
            return name
    raise DataError(f"'{path}' has no label column ({', '.join(_LABELS)}); it has {table.column_names}.")


def _with_plain_labels(table: pa.Table, column: str, path: Path) -> pa.Table:
    """Return the table with labels that are int64 or string: categories are decoded."""
    labels = table.column(column)
    kind = labels.type.value_type if pa.types.is_dictionary(labels.type) else labels.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"'{path}': the label column '{column}' contains {kind}; expected integers or strings.")
    try:
        plain = labels.cast(pa.int64() if pa.types.is_integer(kind) else pa.string())
    except pa.ArrowException as error:
        raise DataError(f"'{path}': the label column '{column}' cannot be read: {error}.") from error
    field = table.schema.field(column).with_type(plain.type)
    return table.set_column(table.column_names.index(column), field, plain)


def _classes(tables: dict[str, pa.Table], column: str, path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names and, for string labels, the code of each."""
    schema = next(iter(tables.values())).schema
    names = _names_in_metadata(schema, column)
    kind = schema.field(column).type
    if any(table.schema.field(column).type != kind for table in tables.values()):
        raise DataError(f"'{path}': the label column '{column}' has integers in some files and strings in others.")
    if pa.types.is_integer(kind):
        if names is None:
            top = max(int(pc.max(table.column(column)).as_py() or 0) for table in tables.values())
            if top >= _MOST_CLASSES:
                raise DataError(f"'{path}': label {top} would make {top + 1:,} classes; number them from 0.")
            names = [str(label) for label in range(top + 1)]
        return tuple(names), {}
    found = sorted({str(v) for table in tables.values() for v in table.column(column).unique().to_pylist()})
    return tuple(names or found), {name: code for code, name in enumerate(names or found)}


def _codes(column: pa.ChunkedArray, code: dict[str, int], path: Path) -> np.ndarray[Any, Any]:
    if column.null_count:
        row = next(i for i, value in enumerate(column) if not value.is_valid)
        raise DataError(f"{path} row {row}: the label is missing ({column.null_count} rows in total).")
    if not code:
        return np.asarray(column.to_numpy())
    return np.asarray([code.get(value, -1) for value in column.to_pylist()])


def _code_columns(
    tables: dict[str, pa.Table], taken: set[str]
) -> tuple[dict[str, dict[str, NDArray[np.int64]]], dict[str, NDArray[np.str_]]]:
    """Return the other plain columns of each split, their values numbered alike in all splits, and these values."""
    schema = next(iter(tables.values())).schema
    coded: dict[str, dict[str, NDArray[np.int64]]] = {split: {} for split in tables}
    known: dict[str, NDArray[np.str_]] = {}
    for field in schema:
        everywhere = all(field.name in table.column_names for table in tables.values())
        if field.name in taken or not _is_plain(field.type) or not everywhere:
            continue
        values = {split: np.asarray(table.column(field.name).to_pylist(), dtype=str) for split, table in tables.items()}
        known[field.name] = np.unique(np.concatenate(list(values.values())))
        for split, of_split in values.items():
            coded[split][field.name] = np.searchsorted(known[field.name], of_split).astype(np.int64)
    return coded, known


def _is_plain(kind: pa.DataType) -> bool:
    """Return True for numbers, truth values, texts and categories of these."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    return any(test(kind) for test in (*tests, pa.types.is_large_string))


def _names_in_metadata(schema: pa.Schema, column: str) -> list[str] | None:
    try:
        info = read_json((schema.metadata or {})[b"huggingface"])
        names = info["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) and names else None


def parquet_bytes(
    files: Sequence[bytes], names: Sequence[str], labels: NDArray[np.int64], classes: Sequence[str]
) -> bytes:
    """Write image files and labels as parquet in the layout of Hugging Face, with the class names in the schema."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(classes), "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    images = pa.StructArray.from_arrays([pa.array(files, pa.binary()), pa.array(names, pa.string())], ["bytes", "path"])
    table = pa.table({"image": images, "label": pa.array(labels)}).replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="none", row_group_size=1000)
    return buffer.getvalue()
