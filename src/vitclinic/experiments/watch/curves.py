"""The curves of a run that may still be written: only what was appended is read."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from vitclinic.training.rows import Row, parse_row

CHUNK = 2**23
"""Bytes that are read at a time; a larger file takes several looks."""
_PLACES = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}
"""Numbers of rows that have a panel, of all kinds of runs; the metrics of a task come behind the loss."""


NO_SCORE = frozenset({"epoch", "lr", "grad_norm"})
"""Fractional numbers of a row that say nothing of how good a network is."""
_ENDS = ("_low", "_high")


def is_number(value: Any) -> bool:
    """Return True for a finite number that fits into a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_score(name: str, value: Any) -> bool:
    """Return True for the measured numbers of a row: no counts, settings or ends of intervals."""
    return isinstance(value, float) and is_number(value) and name not in NO_SCORE and not name.endswith(_ENDS)


class Curves:
    """Numbers over steps by panel and kind of row, as far as `metrics.jsonl` was read.

    Args:
        path: The metrics file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0
        self._series: dict[tuple[str, str], tuple[array[float], array[float]]] = {}

    def read(self, stamp: tuple[int, int, int] | None) -> bool:
        """Read what was appended; return True if that is all.

        A file that was replaced, as a resumed run does, or that became shorter is read from its start.

        Args:
            stamp: Inode, size and time of the file; None if there is none.
        """
        if stamp is None or stamp[0] != self._inode or stamp[1] < self._offset:
            self._series, self._offset = {}, 0
        if stamp is None:
            return True
        self._inode = stamp[0]
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(CHUNK)
        except OSError:
            return True
        lines = content.split(b"\n")
        self._offset += len(content) - len(lines[-1])
        if len(lines) == 1 and len(content) == CHUNK:  # no row is as long: skip what is no row
            self._offset += len(content)
        for line in lines[:-1]:
            if (row := parse_row(line)) is not None:
                self._add(row)
        return len(content) < CHUNK

    def _add(self, row: Row) -> None:
        if not is_number(row["step"]) or row["kind"] not in ("train", "val"):
            return
        parts = row.get("losses")  # of which a val row has one, by its own name too
        for name, value in row.items():
            if isinstance(parts, dict) and name in parts:
                continue
            common = name in _PLACES and is_number(value) and (name == "loss" or row["kind"] == "train")
            if common or (row["kind"] == "val" and name not in _PLACES and is_score(name, value)):
                steps, values = self._series.setdefault(
                    (_PLACES.get(name, name), row["kind"]), (array("d"), array("d"))
                )
                steps.append(row["step"])
                values.append(value)

    def panels(self) -> dict[str, dict[str, dict[str, list[float | None]]]]:
        """Return the curves to draw: {panel: {kind: {step, mean, low, high}}}, thinned."""
        from vitclinic.reports.figures.training import thin  # which imports plotly

        found: dict[str, dict[str, Any]] = {"loss": {}}
        last = [place for name, place in _PLACES.items() if name != "loss"]
        for panel, kind in sorted(self._series, key=lambda key: last.index(key[0]) + 1 if key[0] in last else 0):
            steps, values = self._series[panel, kind]
            curve = thin(np.array(steps), np.array(values))
            shown = {"mean": curve.mean, "low": curve.low, "high": curve.high}
            plain = {name: [_round(value) for value in column] for name, column in shown.items()}
            found.setdefault(panel, {})[kind] = {"step": curve.step.tolist(), **plain}
        return found


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
