"""`metrics.jsonl`: one JSON object a line, in the order things happened.

Every row has `kind` (train, val, test), `step`, `epoch`, `loss`, `losses`, `lr` and `grad_norm`. What depends
on the clock is under `timing` and is no part of a run's identity. A number that is not finite is null, for JSON
has no other word for it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from vitclinic.files import write_errors, write_text

Row = dict[str, Any]


class MetricsFile:
    """Appends rows; on resume, cuts back to a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        with write_errors(self.path):
            self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """All whole rows; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut_back(path: Path, step: int) -> None:
    """Forget what was recorded after `step`, and the final test, which will be made again."""
    kept = [row for row in read_rows(path) if row["step"] <= step and row["kind"] != "test"]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def without_timing(rows: list[Row]) -> list[Row]:
    """The rows without what depends on the clock: equal for equal runs."""
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]
