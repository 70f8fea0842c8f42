"""Checks of `data.json` and of the results in `status.json`, so that their readers can rely on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitclinic._core.errors import DamagedFileError
from vitclinic._core.io import read_record

_FIELDS = {"name": str, "classes": list, "size": list, "channels": int, "digest": str, "counts": dict}
_ADVICE = "restore it from a copy, or train again"


def read_data_facts(file: Path) -> dict[str, Any]:
    """Return the content of a run's `data.json`.

    Raises:
        DamagedFileError: It cannot be read, or a field is missing or wrong.
    """
    facts = read_record(file, _FIELDS, _ADVICE)
    counts, text = facts["counts"], facts.get("text")
    sound = {
        "classes": all(isinstance(name, str) for name in facts["classes"]),
        "size": _is_size(facts["size"]),
        "channels": facts["channels"] > 0,
        "counts": all(_is_whole(count) for count in counts.values()) and counts.get("train", 0) > 0,
        "framed": "framed" not in facts or _is_size(facts["framed"]),
        "whole": "framed" not in facts or isinstance(facts.get("whole"), bool),
        "text": text is None or _is_text(text),
    }
    wrong = next((field for field, holds in sound.items() if not holds), None)
    if wrong is not None:
        raise DamagedFileError(f"'{file}' is damaged ('{wrong}' is missing or wrong); {_ADVICE}.")
    return facts


def are_results(value: Any, metrics: Iterable[str]) -> bool:
    """Return True if `value` has a score for each split, with a number for each of these metrics.

    Example:
        >>> are_results({"test": {"step": 4, "count": 10, "accuracy": 0.5}}, ["accuracy"])
        True
        >>> are_results({"test": {"step": 4, "count": 10, "accuracy": None}}, ["accuracy"])
        False
    """
    names = list(metrics)
    return isinstance(value, dict) and all(_is_score(score, names) for score in value.values())


def _is_score(score: Any, metrics: list[str]) -> bool:
    return (
        isinstance(score, Mapping)
        and all(_is_whole(score.get(name)) for name in ("step", "count"))
        and all(isinstance(score.get(name), int | float) for name in metrics)
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_whole(side) and side > 0 for side in value)


def _is_text(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("tokens"), list) or not _is_whole(value.get("length")):
        return False
    return value["length"] > 0 and all(isinstance(token, str) for token in value["tokens"])
