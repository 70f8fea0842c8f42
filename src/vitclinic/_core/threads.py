"""The number of threads for torch: as many as there are cores that nobody else uses.

A thread more than there are idle cores costs more than it brings: the others wait for it at each barrier.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_CPU = re.compile(r"^cpu(\d+) +(.+)$", re.MULTILINE)
_IDLE, _WAITING = 3, 4
"""Places in the counts of /proc/stat, of which the first eight are times of their own; the others are parts of them."""
WATCHED = 0.3
"""Seconds for which the machine is watched."""


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_own_cores() or ()) or os.cpu_count() or 1


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
    """Return the seconds that the cores which this process may use have been busy, all together."""
    try:
        found = _CPU.findall(path.read_text())
    except OSError:
        return None
    own = _own_cores()
    counts = [[int(number) for number in times.split()[:8]] for core, times in found if own is None or int(core) in own]
    if not counts:
        return None
    busy = sum(sum(times) - times[_IDLE] - times[_WAITING] for times in counts)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_cores() -> set[int] | None:
    """Return the numbers of the cores that this process may use; None if the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
