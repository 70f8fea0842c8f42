"""Spans of time, as people write them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s?)?")


def seconds(text: str | int | float) -> float:
    """`90`, `"90s"`, `"3m"`, `"1h30m"` as seconds.

    Example:
        >>> seconds("3m"), seconds("1h30m"), seconds(90)
        (180.0, 5400.0, 90.0)
    """
    match = _TIME.fullmatch(str(text).strip())
    if match is None or not any(match.groups()):
        raise ValueError("write a time such as 90s, 3m or 1h30m")
    hours, minutes, rest = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + rest


def _checked_time(value: str | int | float) -> str | int | float:
    if seconds(value) <= 0:
        raise ValueError("the time must be longer than nothing")
    return value


Time = Annotated[str | int | float, AfterValidator(_checked_time)]
"""A span of time as a field of a config."""
