"""How many threads torch computes with: as many as there are cores that nobody else uses.

A thread more than there are idle cores costs more than it brings: the others wait for it at each barrier.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_CPU = re.compile(r"^cpu +(.+)$", re.MULTILINE)
_IDLE, _WAITING = 3, 4
"""Places in the counts of /proc/stat, of which the first eight are times of their own; the others are parts of them."""
WATCHED = 0.3
"""Seconds for which the machine is watched."""


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_load(watched: float = WATCHED) -> float | None:
    """Return how many cores other processes keep busy, by watching for a moment; None on systems without /proc/stat."""
    before = _read_busy()
    if before is None:
        return None
    own, began = sum(os.times()[:2]), time.monotonic()
    time.sleep(watched)
    after = _read_busy()
    assert after is not None
    taken = after - before - (sum(os.times()[:2]) - own)
    return max(0.0, taken / (time.monotonic() - began))


def choose_threads(cores: int, busy: float) -> int:
    """Return the number of threads beside processes that keep so many cores busy.

    Example:
        >>> [choose_threads(2, busy) for busy in (0.0, 0.4, 0.9, 2.0)], choose_threads(16, 5.2)
        ([2, 2, 1, 1], 11)
    """
    return max(1, cores - round(busy))


def _read_busy(path: Path = _STAT) -> float | None:
    """Return the seconds that all cores together have been busy."""
    try:
        found = _CPU.search(path.read_text())
    except OSError:
        return None
    if found is None:
        return None
    counts = [int(number) for number in found[1].split()[:8]]
    busy = sum(counts) - counts[_IDLE] - counts[_WAITING]
    return busy / os.sysconf("SC_CLK_TCK")
