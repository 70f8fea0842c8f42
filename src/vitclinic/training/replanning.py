"""The course of a run with `max_time`: its number of steps is planned again while the machine shows its speed.

Schedules (rate, weight decay, sizes of images, late rules, percentages) are those of the run as it was planned first. A
new plan bends how steps map to places in that plan: from the step on, what was left of it is spread evenly over the
steps that are left. So no schedule jumps, and each has come to its end at the last step.

When to plan again depends on the clock, what follows from it does not: bends are stored with the checkpoint of their
step, so that a resumed run goes on with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

OFTEN = 20
"""A run is timed this many times at least."""
BRIEF = 0.02
"""Share of the time that must have passed since the last timing."""
FEW = 3
"""Steps that a pace is taken from, at least."""
NOISE = 0.1
"""A plan stands as long as the steps left differ by no more than this share."""


class Course:
    """Places of steps in the first plan of a run.

    Args:
        planned: Number of steps as planned first.
        bends: Steps after which the run was planned again, in order, each with the new number of steps.

    Example:
        >>> course = Course(100, [(50, 60)])  # half of the plan after 50 steps, the rest in ten
        >>> course.total, [course(step) for step in (0, 50, 55, 60)]
        (60, [0, 50.0, 75.0, 100.0])
    """

    def __init__(self, planned: int, bends: Sequence[tuple[int, int]] = ()) -> None:
        self.planned = planned
        self.bends = [(int(step), int(total)) for step, total in bends]

    @property
    def total(self) -> int:
        """Number of steps as planned last."""
        return self.bends[-1][1] if self.bends else self.planned

    def __call__(self, step: int) -> float:
        """Return the place of a step, counted from 0, in the first plan; the step itself if there was no other."""
        place: float = step
        start, begun, total = 0, 0.0, self.planned
        for at, new in self.bends:
            if step < at:
                break
            begun += (at - start) * (self.planned - begun) / max(1, total - start)
            start, total = at, new
            place = begun + (step - start) * (self.planned - begun) / max(1, total - start)
        return place

    def share(self, step: int) -> float:
        """Return the share of the run that is done before a step, counted from 0."""
        return self(step) / self.planned

    def plain(self) -> dict[str, object]:
        """Return the course as plain data, for a checkpoint."""
        return {"planned": self.planned, "bends": self.bends}

    def bend(self, step: int, total: int) -> None:
        """Plan again: after `step` steps, the run has `total`."""
        self.bends.append((step, total))


class Timekeeper:
    """Says how many steps a run with `max_time` has time for, from what they took so far.

    Args:
        budget: Seconds for training, validation and the scores at the end.
        spent: Seconds that earlier sessions of the run took.
        step: Steps made before this session.
    """

    def __init__(self, budget: float, spent: float = 0.0, step: int = 0) -> None:
        self.budget = budget
        self._began = time.monotonic() - spent
        self._first = step + 1
        self._since, self._step = spent, step
        self._next = step + 1

    @property
    def spent(self) -> float:
        """Seconds that the run has taken, over all its sessions."""
        return time.monotonic() - self._began

    def is_due(self, step: int, total: int) -> bool:
        """Tell whether the run is to be timed after this step, of `total`: at times, and always before the last one.

        The first step of a session starts workers and kernels, too, and says nothing of the pace.
        """
        if step == total - 1:
            return True
        if step == self._first:
            self.restart(step)
        taken = self.spent - self._since
        soon = step >= self._next and taken >= self.budget * BRIEF
        return step - self._step >= FEW and (soon or taken >= self.budget / OFTEN)

    def restart(self, step: int) -> None:
        """Take the pace from this step on: those before it cost something else."""
        self._since, self._step = self.spent, step

    def plan(self, step: int, total: int, reserve: float) -> int | None:
        """Return the number of steps that there is time for; None if the plan of `total` stands.

        Args:
            step: Steps made.
            total: Steps as planned last.
            reserve: Seconds for the scores at the end.
        """
        spent = self.spent
        pace = (spent - self._since) / max(1, step - self._step)
        left = max(1, math.floor((self.budget - reserve - spent) / max(pace, 1e-9)))
        self._since, self._step = spent, step
        stands = abs(left - (total - step)) <= NOISE * (total - step)
        new = total if stands else step + left
        self._next = step + max(1, (new - step) // 4)  # often at first, when little is known
        return None if stands else new
