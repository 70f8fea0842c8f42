"""Durations, as people write them."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import AfterValidator

from vitclinic._core.errors import RecipeError

_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s?)?")

LONGEST = 10 * 365 * 86400
"""Seconds: nobody waits for longer."""

_UNITS = ((86400, "days"), (3600, "h"), (60, "min"))


def seconds(text: str | int | float) -> float:
    """Convert `90`, `"90s"`, `"3m"` or `"1h30m"` to seconds.

    Example:
        >>> seconds("3m"), seconds("1h30m"), seconds(90)
        (180.0, 5400.0, 90.0)
    """
    match = _TIME.fullmatch(str(text).strip())
    if match is None or not any(match.groups()):
        raise ValueError("write a time such as 90s, 3m or 1h30m")
    hours, minutes, rest = (float(part or 0) for part in match.groups())
    total = 3600 * hours + 60 * minutes + rest
    if total > LONGEST:
        raise ValueError("write a time of at most 10 years")
    return total


def format_duration(span: float) -> str:
    """Format seconds for people to read.

    Example:
        >>> [format_duration(span) for span in (0.2, 42.4, 200, 1800, 9000, 400_000)]
        ['under 1 s', '42 s', '3.3 min', '30 min', '2.5 h', '4.6 days']
    """
    if not math.isfinite(span):
        return "an unknown time"
    if span < 1:
        return "under 1 s"
    if span < 90:
        return f"{round(span)} s"
    size, unit = next(pair for pair in _UNITS if span >= 1.5 * pair[0])
    amount = span / size
    return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}".replace(".0 ", " ")


def parse_budget(budget: str | int | float) -> float:
    """Return a budget of time in seconds.

    Raises:
        RecipeError: If it is not a time, or not more than nothing.

    Example:
        >>> parse_budget("5m")
        300.0
    """
    try:
        found = seconds(budget)
    except ValueError as error:
        raise RecipeError(f"'budget': {error} (got {budget!r}).") from None
    if not found:
        raise RecipeError("'budget' must be more than 0 seconds.")
    return found


def _check_time(value: str | int | float) -> str | int | float:
    if seconds(value) <= 0:
        raise ValueError("the time must be positive")
    return value


Time = Annotated[str | int | float, AfterValidator(_check_time)]
"""A span of time as a field of a config."""
