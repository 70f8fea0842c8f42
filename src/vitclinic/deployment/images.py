"""Image files that a user names, found without torch, and the tables that their predictions are written to."""

from __future__ import annotations

import csv
import glob
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import DataError, MissingExtraError, RecipeError
from vitclinic._core.io import LARGEST_TABLE, expand_path, find_path, read_json_lines, read_text, staged
from vitclinic.data.folder import IMAGE_SUFFIXES, UNREADABLE_SUFFIXES, image_files

STDIN = "-"
SUFFIXES = (".csv", ".jsonl", ".parquet")
COCO = ".json"
"""The suffix of objects as COCO writes them."""
TABLES = (".csv", ".jsonl")
"""Suffixes of tables of questions."""


class Asked(NamedTuple):
    """An image file with questions about it."""

    image: str
    questions: tuple[str, ...]


def find_images(words: Iterable[str | Path], standard_input: IO[str] | None = None) -> list[str]:
    """Return the image files that some words name.

    Args:
        words: Files; folders, of which all images below are taken; patterns such as `photos/**/*.jpg`; or `-` for a
            list of files on standard input, one a line (or separated by NUL, as `find -print0` writes them).
        standard_input: Where `-` reads from; the process's own unless given.

    Raises:
        DataError: A word names no image.

    Example:
        >>> find_images(["no/such.png"])
        Traceback (most recent call last):
        vitclinic._core.errors.DataError: There is no image at 'no/such.png'.
    """
    return [name for word in words for name in _expand(str(word), standard_input or sys.stdin)]


def find_inputs(words: Iterable[str | Path], asks: bool = False) -> list[str | Asked]:
    """Return the image files that some words name, as `find_images` does, and those of tables with their questions.

    Args:
        words: As `find_images` takes them.
        asks: The network answers questions: files .csv and .jsonl are then tables with the columns `image`, relative to
            its folder, and `question`. To other networks they are files like any, which cannot be read as images.

    Raises:
        DataError: A word names no image, or a row of a table has none, or no question.
    """
    found: list[str | Asked] = []
    for word in words:
        table = find_path(str(word), DataError, "images") if asks and Path(word).suffix in TABLES else None
        found += find_images([word]) if table is None or not table.is_file() else _read_questions(table)
    return found


def takes_questions(target: str) -> bool:
    """Return True if a target names a run whose network answers questions; torch is not loaded for it."""
    from vitclinic.training import Run
    from vitclinic.training.run import find_run

    found = find_run(target)
    return found is not None and Run.open(found[0]).recipe.task.target == "questions"


def _read_questions(table: Path) -> list[Asked]:
    """Return the images of a table in the order of their first rows; one that several rows name is there once."""
    rows: list[Any] = _read_csv(table) if table.suffix == ".csv" else _read_jsonl(table)
    found: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        for name in ("image", "question"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise DataError(
                    f"'{table}': row {number} has no '{name}'; a table of questions has image and question."
                )
        found.setdefault(str(table.parent / row["image"]), []).append(row["question"])
    if not found:
        raise DataError(f"'{table}' has no rows; a table of questions has the columns image and question.")
    return [Asked(image, tuple(questions)) for image, questions in found.items()]


def _read_csv(table: Path) -> list[dict[str, Any]]:
    try:
        return list(csv.DictReader(io.StringIO(read_text(table, DataError, LARGEST_TABLE), newline="")))
    except csv.Error as error:
        raise DataError(f"'{table}' cannot be read as csv: {error}.") from error


def _read_jsonl(table: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_json_lines(table, DataError, "image and question")]


def _expand(word: str, standard_input: IO[str]) -> list[str]:
    if word == STDIN:
        text = standard_input.read()
        listed = text.split("\0") if "\0" in text else text.splitlines()
        found = [file for name in listed if name for file in _open_folder(name)]
        if not found:
            raise DataError("Standard input lists no image; write one file a line.")
        return found
    path = expand_path(word, DataError)
    if find_path(word, DataError, "images") is not None:
        found = _open_folder(str(path))
        if not found:
            raise DataError(f"'{word}' contains no images ({', '.join(sorted(IMAGE_SUFFIXES))}).")
        return found
    matches = sorted(glob.glob(str(path), recursive=True))
    found = [name for name in matches if Path(name).is_file()]
    found = found or [file for name in matches for file in _open_folder(name)]  # as if the shell had expanded it
    if not found:
        raise DataError(f"There is no image at '{word}'.")
    return found


def _open_folder(name: str) -> list[str]:
    """Return the images in and below a folder, undecodable formats included; of anything else, its name."""
    try:
        is_folder = Path(name).is_dir()
    except (OSError, ValueError):  # a name that is too long is skipped as other unreadable images are
        is_folder = False
    if not is_folder:
        return [name]
    if not any(image_files(Path(name))):
        return []
    return sorted(str(file) for file in image_files(Path(name), IMAGE_SUFFIXES | UNREADABLE_SUFFIXES))


def check_output(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """Raise for a file that predictions cannot be written to: its suffix, its folder, a package that is missing."""
    if path.suffix not in suffixes:
        raise RecipeError(f"'{path}' must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}.")
    find_path(str(path), RecipeError, "a place to write to")
    if path.is_dir():
        raise RecipeError(f"'{path}' is a folder; name a file.")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"'{path}' cannot be written: folder '{path.parent}' does not exist.")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError(f"Writing {path.name}", "parquet")


Row = dict[str, Any]
"""`file`, then `class` and `probability` of the likeliest class, `class_2` and `probability_2` of the next, and so on;
last, where all are asked for, `p(NAME)` of each class."""


def make_rows(
    files: Sequence[str],
    probabilities: NDArray[np.float64],
    classes: Sequence[str],
    top_k: int,
    everything: bool,
    names: tuple[str, str, str] = ("class", "probability", "p"),
) -> Iterator[Row]:
    """Yield a row for each image.

    Args:
        files: The images.
        probabilities: Of each image, those of the classes, [images, classes].
        classes: Their names.
        top_k: How many of the likeliest classes to list; ties go to the first class.
        everything: Also tell the probability of each class.
        names: What to call a class, its probability, and the probability of a class by its name.

    Example:
        >>> next(make_rows(["a.png"], np.array([[0.2, 0.8]]), ["cat", "dog"], 2, False))
        {'file': 'a.png', 'class': 'dog', 'probability': 0.8, 'class_2': 'cat', 'probability_2': 0.2}
    """
    which, value, each = names
    rounded = probabilities.round(6)
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    for place, file in enumerate(files):
        told: Row = {"file": file}
        for rank, k in enumerate(ranked[place].tolist(), 1):
            behind = f"_{rank}" if rank > 1 else ""
            told |= {f"{which}{behind}": classes[k], f"{value}{behind}": float(rounded[place, k])}
        if everything:
            told |= {f"{each}({name})": p for name, p in zip(classes, rounded[place].tolist(), strict=True)}
        yield told


class RowWriter(Protocol):
    """Protocol of what takes rows, some at a time."""

    def __call__(self, rows: Sequence[Row]) -> None: ...


@contextmanager
def open_rows(path: Path | None, columns: Sequence[str] | None = None) -> Iterator[RowWriter]:
    """Give a function that writes rows to a file, which appears whole at the end.

    Args:
        path: A .csv, .jsonl or .parquet file; None is CSV on standard output.
        columns: Those of a table that may have no rows; otherwise the first row has them.
    """
    if path is None:
        yield _readable(_csv(sys.stdout, columns))
    elif path.suffix == ".parquet":
        with staged(path) as staging, _parquet(staging, columns) as write:
            yield _readable(write)
    else:
        with staged(path) as staging, staging.open("w", encoding="utf-8", newline="") as file:
            yield _readable(_csv(file, columns) if path.suffix == ".csv" else _json_lines(file))


def _readable(write: RowWriter) -> RowWriter:
    r"""Return a writer that writes bytes of file names that are no UTF-8 as `\udce9`: every reader takes the table."""

    def write_escaped(rows: Sequence[Row]) -> None:
        write([{key: _escape(value) for key, value in row.items()} for row in rows])

    return write_escaped


def _escape(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _csv(file: IO[str], columns: Sequence[str] | None) -> RowWriter:
    written: list[csv.DictWriter[str]] = []

    def write(rows: Sequence[Row]) -> None:
        if (rows or columns) and not written:
            written.append(csv.DictWriter(file, columns or list(rows[0]), lineterminator="\n"))
            written[0].writeheader()
        for writer in written:
            writer.writerows(rows)

    return write


def _json_lines(file: IO[str]) -> RowWriter:
    def write(rows: Sequence[Mapping[str, Any]]) -> None:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    return write


@contextmanager
def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[RowWriter]:
    import pyarrow
    import pyarrow.parquet

    opened: list[Any] = []

    def write(rows: Sequence[Row]) -> None:
        if not rows:
            return
        table = pyarrow.Table.from_pylist(list(rows))
        if not opened:
            opened.append(pyarrow.parquet.ParquetWriter(path, table.schema))
        opened[0].write_table(table)

    try:
        yield write
        if columns and not opened:
            pyarrow.parquet.write_table(pyarrow.table({name: [] for name in columns}), path)
    finally:
        for writer in opened:
            writer.close()
