"""Curves of trainings by other libraries, as rows of our metrics: CSV files and TensorBoard's events.

timm         summary.csv: epoch, train_loss, eval_loss, eval_top1, eval_top5, lr
Lightning    metrics.csv: epoch, step, train_loss_step, val_loss, lr-AdamW, ... with empty cells
any CSV      a column `step` or `epoch`, others named as above; Keras' CSVLogger among them
TensorBoard  a folder with event files, or one of them (an extra)
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitclinic._core.errors import DataError, MissingExtraError
from vitclinic._core.io import find_path, read_text
from vitclinic.training.run import Row

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
        raise DataError(f"'{path}' is no CSV file: {error}.") from error
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
