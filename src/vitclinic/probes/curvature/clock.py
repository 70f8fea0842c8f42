"""The time budget of a measurement, which processes that measure together keep together."""

from __future__ import annotations

import time

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.time import seconds


class Clock:
    """Time budget of a measurement, or of a part of it (`share`).

    Clocks of processes differ: those that measure together stop when the first of them is late, so each must ask as
    often as the others.
    """

    def __init__(
        self, budget: str | int | float | None, *, share: float = 1.0, distributed: Distributed = ALONE
    ) -> None:
        self.ends = None if budget is None else time.monotonic() + share * seconds(budget)
        self.distributed = distributed

    def has_expired(self) -> bool:
        """Return True if any process is late."""
        return self.ends is not None and self.distributed.any(self.is_late())

    def is_late(self) -> bool:
        """Return True if this process's own time is up; for work inside a process, without synchronization."""
        return self.ends is not None and time.monotonic() >= self.ends
