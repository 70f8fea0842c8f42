"""Rows of metrics.jsonl, to be compared."""

from __future__ import annotations

from collections.abc import Iterable

from vitclinic.training.rows import Row


def drop_timing(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without `timing`: equal runs then have equal rows."""
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]
