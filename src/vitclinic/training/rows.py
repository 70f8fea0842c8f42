"""Rows of metrics: the file that a run writes, and the curves of trainings by other libraries.

`metrics.jsonl` has one JSON object per line, in order. Every row has `kind` (train, val, test), `step`, `epoch`,
`loss`, `losses`, `lr` and `grad_norm`. Values that depend on the clock are under `timing` and do not count when runs
are compared. Numbers that are not finite become null, since JSON cannot express them.

Curves of other libraries are read from CSV files and from TensorBoard's events:

timm         summary.csv: epoch, train_loss, eval_loss, eval_top1, eval_top5, lr
Lightning    metrics.csv: epoch, step, train_loss_step, val_loss, lr-AdamW, ... with empty cells
any CSV      a column `step` or `epoch`, others named as above; Keras' CSVLogger among them
TensorBoard  a folder with event files, or one of them (an extra)
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitclinic._core.errors import DamagedFileError, DataError, MissingExtraError
from vitclinic._core.io import find_path, read_json, read_text, refuse_special, write_errors, write_text

log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsFile:
    """The open `metrics.jsonl` of a run, for appending rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Write one row."""
        with write_errors(self.path):
            self._file.write(json.dumps(_replace_nonfinite(row), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush everything to the disk."""
        with write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Read all complete rows; a last line truncated by a kill is ignored, damaged ones are left out with a warning."""
    if not path.exists():
        return []
    try:
        refuse_special(path)
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DamagedFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    if len(rows) < len(lines):
        log.warning("'%s' has %d damaged rows, which are left out.", path, len(lines) - len(rows))
    return rows


def parse_row(line: bytes) -> Row | None:
    """Return the row in a line; None if it is damaged."""
    try:
        row = read_json(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)
    return row if whole else None


def cut_back(path: Path, step: int) -> None:
    """Drop rows after `step`, and the final test, which will run again."""
    write_rows(path, [row for row in read_rows(path) if row["step"] <= step and row["kind"] != "test"])


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file of rows."""
    write_text(path, "".join(json.dumps(_replace_nonfinite(row), allow_nan=False) + "\n" for row in rows))


Table = dict[str, list[tuple[int, float]]]
"""Numbers with their steps, by the name of their column or tag."""

_STEPS = ("step", "global_step", "iteration", "iter")
_EPOCHS = ("epoch",)
_KINDS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "eval": "val"}
_NAMES = {
    **dict.fromkeys(("top1", "acc", "acc1", "acc_top1", "accuracy", "top1_acc", "accuracy_top1"), "accuracy"),
    **dict.fromkeys(("top5", "acc5", "acc_top5", "top5_acc", "accuracy_top5"), "accuracy_top5"),
    **dict.fromkeys(("lr", "learning_rate"), "lr"),
    **dict.fromkeys(("grad_norm", "gradient_norm", "total_norm"), "grad_norm"),
}
_TENSORBOARD = "tfevents"


def read_curves(source: str | Path) -> list[Row]:
    """Read the curves of a training by another library.

    Args:
        source: A CSV file, a TensorBoard event file, or a folder with such files.

    Returns:
        Rows of kind train and val, in order of their steps; a file without steps has epochs in their place. Accuracies
        in percent become shares.

    Raises:
        DataError: It cannot be read, or has no training loss.
        MissingExtraError: TensorBoard is not installed.

    Example:
        >>> read_curves("output/train/summary.csv")[0]  # doctest: +SKIP
        {'kind': 'train', 'step': 0, 'loss': 6.9, 'lr': 1e-06}
    """
    path = find_path(str(source), DataError, "curves")
    if path is None:
        raise DataError(f"There are no curves at '{source}': write a CSV file or a folder of TensorBoard.")
    table = _read_events(path) if path.is_dir() or _TENSORBOARD in path.name else _read_csv(path)
    rows = _make_rows(table)
    if not any("loss" in row for row in rows if row["kind"] == "train"):
        found = ", ".join(list(table)[:8]) or "nothing"
        raise DataError(f"'{source}' has no training loss; name its column train_loss (found: {found}).")
    return rows


def _read_csv(path: Path) -> Table:
    reader = csv.DictReader(io.StringIO(read_text(path, DataError)), skipinitialspace=True)
    columns = {name.strip().lower(): name for name in reader.fieldnames or () if name and name.strip()}
    place = next((columns[name] for name in (*_STEPS, *_EPOCHS) if name in columns), None)
    if place is None:
        raise DataError(f"'{path}' has no column step or epoch in its first line.")
    table: Table = {}
    try:
        for line in reader:
            step = _number(line[place])
            if not math.isfinite(step):
                continue
            for name in columns.values():
                if name != place and (text := (line[name] or "").strip()):
                    table.setdefault(name, []).append((int(step), _number(text)))
    except csv.Error as error:
        raise DataError(f"'{path}' is not a CSV file: {error}.") from error
    return table


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def _read_events(path: Path) -> Table:
    if find_spec("tensorboard") is None:
        raise MissingExtraError("reading TensorBoard's events", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [path] if path.is_file() else sorted(file for file in path.rglob(f"*{_TENSORBOARD}*") if file.is_file())
    if not files:
        raise DataError(f"'{path}' has no event files of TensorBoard in it.")
    table: Table = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        try:
            events.Reload()
        except Exception as error:  # a damaged file raises what its reader happens to meet
            raise DataError(f"'{file}' cannot be read as TensorBoard's events: {type(error).__name__}.") from error
        for tag in events.Tags()["scalars"]:
            table.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return table


def split_name(name: str) -> tuple[str, str] | None:
    """Return the kind of row, and the name in it, that a column or tag stands for; None if it is of the test set.

    Example:
        >>> [split_name(name) for name in ("eval_top1", "train_loss_step", "val/acc", "lr-AdamW", "Loss/train")]
        [('val', 'accuracy'), ('train', 'loss'), ('val', 'accuracy'), ('train', 'lr'), ('train', 'loss')]
    """
    words = re.split(r"[/_.\s]+", re.sub(r"^(lr)-.*", r"\1", name.strip().lower()))
    if "test" in words:
        return None
    kinds = [word for word in (words[0], words[-1]) if word in _KINDS]
    rest = [word for word in words if word not in kinds[:1]] if kinds else words
    if len(rest) > 1 and rest[-1] in ("step", "epoch"):
        rest = rest[:-1]
    return (_KINDS[kinds[0]] if kinds else "train"), _NAMES.get("_".join(rest), "_".join(rest))


def _make_rows(table: Table) -> list[Row]:
    """Return a row for each kind and step; of a number that is there by step and by epoch, that by step."""
    rows: dict[tuple[int, str], Row] = {}
    for column in _prefer_steps(table):
        named = split_name(column)
        if named is None:
            continue
        kind, name = named
        values = table[column]
        percent = name.startswith("accuracy") and any(value > 1 for _, value in values)
        for step, value in values:
            row = rows.setdefault((step, kind), {"kind": kind, "step": step})
            row.setdefault(name, value / 100 if percent else value)
    return [rows[key] for key in sorted(rows) if rows[key].keys() - {"kind", "step", "epoch"}]


def _prefer_steps(table: Mapping[str, Any]) -> Iterable[str]:
    """Return the columns without those by epoch that are there by step, too, as Lightning writes both."""
    return [name for name in table if not (name.endswith("_epoch") and f"{name.removesuffix('_epoch')}_step" in table)]
