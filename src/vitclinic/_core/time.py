"""Spans of time, as people write them."""

from __future__ import annotations

import math
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


def spoken(span: float) -> str:
    """Seconds as one says them.

    Example:
        >>> spoken(0.2), spoken(42.4), spoken(200), spoken(9000)
        ('under 1 s', '42 s', '3 min', '2.5 h')
    """
    if not math.isfinite(span):
        return "an unknown time"
    if span < 1:
        return "under 1 s"
    if span < 90:
        return f"{round(span)} s"
    return f"{round(span / 60)} min" if span < 5400 else f"{span / 3600:.1f} h"


def _checked_time(value: str | int | float) -> str | int | float:
    if seconds(value) <= 0:
        raise ValueError("the time must be longer than nothing")
    return value


Time = Annotated[str | int | float, AfterValidator(_checked_time)]
"""A span of time as a field of a config."""
