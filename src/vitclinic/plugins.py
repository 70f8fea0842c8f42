"""What installed packages add to vitclinic by entry points."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

log = logging.getLogger(__name__)


@cache
def load_entry_points(group: str, register: Callable[[Any], object]) -> None:
    """Hand what the entry points of `group` name to `register`, once in a process.

    One that cannot be loaded, or that `register` refuses with an exception, is left out with a warning.
    """
    for entry_point in entry_points(group=group):
        try:
            register(entry_point.load())
        except Exception as error:  # another package's code may raise anything, and the rest must go on
            log.info("%s cannot be used", entry_point, exc_info=error)
            _warn(entry_point, error)


def _warn(entry_point: EntryPoint, error: Exception) -> None:
    package = "" if entry_point.dist is None else f" of the package {entry_point.dist.name}"
    log.warning(
        "The entry point %s = %s%s (%s) is left out: %s: %s",
        *(entry_point.name, entry_point.value, package, entry_point.group, type(error).__name__, error),
    )
