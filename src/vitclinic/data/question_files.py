"""`data=FILE.jsonl` or parquet with questions: rows of `image`, `question` and `answer` or `answers`.

A line of JSONL is {"image": "photos/1.jpg", "question": "what is this", "answer": "a cat"}; paths are relative to the
file. `answers` is a list, where several people answered, of texts or of {"answer": text}, as VQA has them. In parquet
`image` holds paths or, in a struct, `bytes`. Rows with the same image are one image with several questions, so that a
held-out split has images that training has not seen. A folder's files are assigned to splits by their names.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitclinic._core.errors import DataError, MissingExtraError
from vitclinic._core.io import fingerprint, read_json_lines
from vitclinic.data.annotations.annotation import Question
from vitclinic.data.config import DataConfig
from vitclinic.data.folder import FileRecords
from vitclinic.data.source import LEAVE_OUT, SPLITS, Records, Source
from vitclinic.data.text import normalize_answer

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]


@dataclass
class _Asked:
    """The images of a split, in the order of their first rows, with their questions."""

    images: list[Any] = field(default_factory=list)
    """Where each is: a path, or the number of its first row."""
    questions: list[tuple[Question, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Rows that were left out."""


class AskedFiles(FileRecords):
    """Images in files, with questions."""

    def __init__(self, root: Path, paths: list[str], questions: Sequence[tuple[Question, ...]]) -> None:
        super().__init__(root, paths, [0] * len(paths))
        self._questions = questions

    def questions(self, index: int) -> tuple[Question, ...]:
        """Return the questions about an image."""
        return self._questions[index]


def open_asked(path: Path, config: DataConfig) -> Source:
    """Open JSONL or parquet with questions as a source.

    Args:
        path: A file, or a folder of files named after their splits.
        config: The section `data` of a recipe; of it `answers` and `on_error`.

    Raises:
        DataError: A row has no question, no answer or no image, or there is nothing to read.
    """
    files = _find_files(path)
    skip = config.on_error == "skip"
    opened = {split: _open_split(paths, skip) for split, paths in files.items()}
    splits: dict[str, Records] = {split: records for split, (records, _) in opened.items()}
    notes = tuple(note for _, left_out in opened.values() for note in left_out)
    answers = _find_answers(next(iter(splits.values())), config.answers)
    stamps = [
        (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for of in files.values() for file in of
    ]
    identity = fingerprint("asked", stamps, config.answers, config.on_error)
    return Source(str(path), (), splits, identity, notes=notes, targets={"questions": answers})


def holds_questions(path: Path) -> bool:
    """Return True for JSONL, or a folder of it."""
    return path.suffix == ".jsonl" or (path.is_dir() and any(path.glob("*.jsonl")))


def _find_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split."""
    if path.is_file():
        return {"train": [path]}
    listed = sorted(file for suffix in ("jsonl", "parquet") for file in path.glob(f"*.{suffix}"))
    if not listed:
        raise DataError(f"'{path}' has no questions: expected .jsonl or .parquet with image, question and answer.")
    found: dict[str, list[Path]] = {}
    for file in listed:
        split = next((name for name in SPLITS if file.stem.lower().startswith(name)), "train")
        found.setdefault(split, []).append(file)
    return {split: found[split] for split in SPLITS if split in found}


def _open_split(paths: Sequence[Path], skip: bool) -> tuple[Records, list[str]]:
    if paths[0].suffix == ".parquet":
        if find_spec("pyarrow") is None:
            raise MissingExtraError(f"data={paths[0]}", "parquet")
        return _open_table(paths, skip)
    rows = [row for path in paths for row in read_json_lines(path, DataError, "image, question and answer")]
    root = paths[0].parent
    asked = _gather(rows, lambda row: _find_image(root, row), skip)
    return AskedFiles(root, asked.images, asked.questions), asked.notes


def _find_image(root: Path, row: Row) -> tuple[str, str]:
    """Return the path of a row's image, as its key and as what is stored of it."""
    image = row.get("image")
    if not isinstance(image, str) or not image:
        raise _UnusableError(f"'image' is {image!r}; expected an image path")
    if not (root / image).is_file():
        raise _UnusableError(f"there is no image '{root / image}'")
    return image, image


def _open_table(paths: Sequence[Path], skip: bool) -> tuple[Records, list[str]]:
    from vitclinic.data.parquet import AskedRows
    from vitclinic.data.tables import read_table

    table: pa.Table = read_table(list(paths))
    if missing := {"image", "question"}.difference(table.column_names):
        raise DataError(f"'{paths[0]}' has no column '{sorted(missing)[0]}'; it has {', '.join(table.column_names)}.")
    plain = table.select([name for name in ("question", "answer", "answers") if name in table.column_names])
    images = table.column("image")
    rows = ((f"{paths[0]} row {number}", {**row, "row": number}) for number, row in enumerate(plain.to_pylist()))
    root = paths[0].parent
    if images.type in ("string", "large_string"):
        named = ((where, {**row, "image": images[row["row"]].as_py()}) for where, row in rows)
        asked = _gather(named, lambda row: _find_image(root, row), skip)
        return AskedFiles(root, asked.images, asked.questions), asked.notes

    def find(row: Row) -> tuple[bytes, int]:
        number = row["row"]
        value = images[number].as_py()
        content = value.get("bytes") if isinstance(value, dict) else None
        if not content:
            raise _UnusableError("it contains no image bytes")
        return hashlib.sha256(content).digest(), number

    asked = _gather(rows, find, skip)
    return AskedRows(str(paths[0]), images, asked.images, asked.questions), asked.notes


class _UnusableError(Exception):
    """Row that cannot be used, and why."""


def _gather(rows: Iterable[tuple[str, Row]], find: Callable[[Row], tuple[Any, Any]], skip: bool) -> _Asked:
    """Return the images of all rows; one that cannot be used is an error, or noted (`on_error: skip`)."""
    asked = _Asked()
    found: dict[Any, tuple[Any, list[Question]]] = {}
    for where, row in rows:
        try:
            key, place = find(row)
            question = _read_question(row)
        except _UnusableError as problem:
            if not skip:
                raise DataError(f"{where}: {problem}; fix the row, {LEAVE_OUT}.") from None
            asked.notes.append(f"{where}: {problem}.")
            continue
        found.setdefault(key, (place, []))[1].append(question)
    for place, questions in found.values():
        asked.images.append(place)
        asked.questions.append(tuple(questions))
    return asked


def _read_question(row: Row) -> Question:
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise _UnusableError(f"'question' is {text!r}; expected a text")
    return Question(text, tuple(normalize_answer(answer) for answer in _read_answers(row, text)))


def _read_answers(row: Row, question: str) -> list[str]:
    """Return the answers of a row: those of `answers`, or the one `answer`."""
    given = row.get("answers")
    if given is None:
        given = [] if row.get("answer") is None else [row["answer"]]
    if not isinstance(given, list):
        raise _UnusableError(f"'answers' of the question '{question}' is a {type(given).__name__}; expected a list")
    answers: list[Any] = [each.get("answer") if isinstance(each, dict) else each for each in given]
    wrong = next((each for each in answers if not isinstance(each, str)), None)
    if wrong is not None:
        raise _UnusableError(f"an answer to '{question}' is {wrong!r}, a {type(wrong).__name__}; expected a text")
    if not answers or not all(answer.strip() for answer in answers):
        raise _UnusableError(f"the question '{question}' has no answer")
    return answers


def _find_answers(records: Records, most: int | None) -> tuple[str, ...]:
    """Return the answers of training questions, the most frequent first."""
    counts: Counter[str] = Counter()
    for index in range(len(records)):
        for question in records.questions(index):  # type: ignore[attr-defined]
            counts.update(question.answers)
    ordered = sorted(counts, key=lambda answer: (-counts[answer], answer))
    return tuple(ordered[:most])
