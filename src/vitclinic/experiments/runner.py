"""Many runs on one machine: in this process one after another, or in several processes that divide the cores."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitclinic._core.callback import Callback
from vitclinic._core.errors import LockedError
from vitclinic.data import DataConfig
from vitclinic.experiments.pool import Pool
from vitclinic.training import Recipe, Run
from vitclinic.training.interrupts import listen_for_signals

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer

log = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds until the next look at a run that another process is at."""


@dataclass(frozen=True)
class Measured:
    """What was measured of a run."""

    numbers: dict[str, float]
    """By measure; NaN where there is none."""
    missing: dict[str, str]
    """Why there is none."""


After = Callable[[Run, DataConfig], Measured]
"""Measures a run that has ended, on its data, where it was trained; it can be pickled."""


@dataclass(frozen=True)
class Outcome:
    """How the run of a recipe ended. A divergence is a result; a failure is why there is none."""

    recipe: Recipe
    status: Literal["finished", "diverged", "failed"]
    path: Path | None = None
    reason: str | None = None
    measured: Measured = field(default_factory=lambda: Measured({}, {}))
    """Empty unless it was asked for."""

    @property
    def run(self) -> Run:
        """The run directory; only of a run that did not fail."""
        assert self.path is not None
        return Run.open(self.path)


class Watcher:
    """Hears of a list of runs as they go on. Override what you need."""

    def on_progress(self, done: float, total: int) -> None:
        """`done` of `total` runs are done, those at work by the share of their steps."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A run has ended, or was found ended."""


def run_all(
    recipes: Sequence[Recipe],
    pool: Pool,
    *,
    processes: int = 1,
    threads: int | None = None,
    ray: str | None = None,
    after: After | None = None,
    watcher: Watcher | None = None,
) -> list[Outcome]:
    """The outcomes of recipes, in their order; what the pool has is not trained again, nor a recipe listed twice.

    With several `processes`, each has `threads` threads (its share of the cores unless given). A run's numbers depend
    on the number of its threads in their last bits, and on nothing else here: not on how many run beside it. With
    `ray`, the address of a Ray cluster (`auto`: the one at hand), they are its tasks, `threads` cores each. One that
    fails is reported, and the others go on. One that another invocation is at is left for last and waited for, and
    trained on here should that die. Ctrl-C stops when all that are at work are saved, and is raised. `after` is called
    with each run that has ended, also with those that had before.
    """
    watcher = watcher or Watcher()
    ended: dict[Path, Outcome] = {}
    waiting: dict[Path, Recipe] = {}
    for recipe in recipes:
        path = pool.path(recipe)
        found = pool.find(recipe) if after is None else None
        if found is None:
            waiting[path] = recipe
        elif path not in ended:
            ended[path] = outcome_of(recipe, found)
            watcher.on_outcome(ended[path])
    tally = Tally(len(ended), len(ended) + len(waiting), watcher)
    if ray is not None:
        from vitclinic.experiments.ray_cluster import in_cluster

        ended |= in_cluster(waiting, pool.folder, ray, threads or 1, after, tally)
    elif processes == 1:
        ended |= in_turn(waiting, pool, after, tally)
    else:
        from vitclinic.experiments.workers import in_processes

        share = threads or max(1, (os.cpu_count() or 1) // processes)
        ended |= in_processes(waiting, pool.folder, min(processes, len(waiting)), share, after, tally)
    return [ended[pool.path(recipe)] for recipe in recipes]


def in_turn(waiting: Mapping[Path, Recipe], pool: Pool, after: After | None, tally: Tally) -> dict[Path, Outcome]:
    """The outcomes of all that is `waiting`, trained in this process."""
    queue = Queue(waiting)
    ended: dict[Path, Outcome] = {}
    while queue.runs:
        time.sleep(queue.rest())
        path, recipe = queue.take()
        try:
            ended[path] = attempt(pool, recipe, [StepShare(tally, path)], after)
        except LockedError:
            queue.put_back(path, recipe)
        else:
            tally.end(path, ended[path])
    return ended


class Queue:
    """Runs to be done, in their order; one that another process is at goes to the end, and rests before its next turn.

    Since the end is where the latest comes, no run in the queue is ready unless the first one is.
    """

    def __init__(self, waiting: Mapping[Path, Recipe]) -> None:
        self.runs = deque((path, recipe, -math.inf) for path, recipe in waiting.items())
        self.told = False

    def rest(self) -> float:
        """Seconds until the first may be taken."""
        return max(0.0, self.runs[0][2] - time.monotonic())

    def take(self) -> tuple[Path, Recipe]:
        path, recipe, _ = self.runs.popleft()
        return path, recipe

    def put_back(self, path: Path, recipe: Recipe) -> None:
        self.runs.append((path, recipe, time.monotonic() + LOOK_AGAIN))
        if not self.told:
            log.warning("Another process is at work on some of these runs: they are left for last, and waited for.")
        self.told = True


def attempt(pool: Pool, recipe: Recipe, callbacks: Sequence[Callback], after: After | None = None) -> Outcome:
    """Train and measure, or say why that failed. A signal is raised as KeyboardInterrupt, also after the last step.

    That another process is training or measuring it is no failure, and raised as LockedError.
    """
    with listen_for_signals() as interrupt:
        try:
            outcome = _caught(recipe, lambda: outcome_of(recipe, pool.trained(recipe, callbacks)))
        finally:
            if interrupt.signal is not None:
                raise KeyboardInterrupt
    if after is None or outcome.status == "failed":
        return outcome
    return _caught(recipe, lambda: replace(outcome, measured=_measured(outcome.run, recipe, after)))


def _measured(run: Run, recipe: Recipe, after: After) -> Measured:
    """Two that measure a run at a time would do all of it twice, and write the same files."""
    with run.locked():
        return after(run, recipe.data)


def _caught(recipe: Recipe, action: Callable[[], Outcome]) -> Outcome:
    """What the action returns, or its failure: whatever one run dies of, the others go on."""
    try:
        return action()
    except LockedError:
        raise
    except Exception as error:  # a network, a probe or a disk may raise anything
        log.info("a run failed", exc_info=error)
        return Outcome(recipe, "failed", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)


def outcome_of(recipe: Recipe, run: Run) -> Outcome:
    status = run.status
    return Outcome(recipe, status["status"], run.path, status.get("reason"))


class Tally:
    """How far all runs together are."""

    def __init__(self, done: int, total: int, watcher: Watcher) -> None:
        self.done, self.total, self.watcher = done, total, watcher
        self.shares: dict[Path, float] = {}
        self._tell()

    def advance(self, path: Path, share: float) -> None:
        self.shares[path] = share
        self._tell()

    def end(self, path: Path, outcome: Outcome) -> None:
        self.shares.pop(path, None)
        self.done += 1
        self.watcher.on_outcome(outcome)
        self._tell()

    def _tell(self) -> None:
        self.watcher.on_progress(self.done + sum(self.shares.values()), self.total)


class StepShare(Callback):
    """Tells a tally which share of a run's steps is done."""

    def __init__(self, tally: Tally, path: Path) -> None:
        self.tally, self.path = tally, path

    def on_step(self, trainer: Trainer) -> None:
        self.tally.advance(self.path, trainer.step / trainer.total_steps)
