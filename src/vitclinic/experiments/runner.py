"""Train many recipes, each once per digest, no matter who asks for it (`Pool`).

They are trained in this process one after another, in several processes, or on a Ray cluster.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.errors import LockedError
from vitclinic.data import DataConfig, open_data
from vitclinic.training import Recipe, Run, resume, train
from vitclinic.training.signals import listen_for_signals

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer

ENDED = ("finished", "diverged")
"""Statuses in which the same recipe would end again: a divergence is a result like any other."""


def drop_weights(run: Run) -> None:
    """Remove the checkpoints of an ended run, which fill a disk where there are many short trials."""
    shutil.rmtree(run.checkpoints.folder, ignore_errors=True)


class Pool:
    """A folder with one run directory for each recipe's digest; studies and benchmarks may share it.

    Example:
        >>> pool = Pool("runs/pool")
        >>> run = pool.train(build_recipe("shapes", ["seed=1"]))  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._data_digests: dict[tuple[object, ...], str] = {}
        self._settled: dict[str, Recipe] = {}

    def path(self, recipe: Recipe) -> Path:
        """Return where the run of a recipe is, or will be."""
        return self.folder / self._settle(recipe).digest(self._data_digest(recipe))[:16]

    def find(self, recipe: Recipe) -> Run | None:
        """Return the run of a recipe if it is there and has ended."""
        path = self.path(recipe)
        if not (path / "recipe.yaml").is_file():
            return None
        run = Run.open(path)
        return run if run.status["status"] in ENDED else None

    def train(self, recipe: Recipe, callbacks: Sequence[Callback] = ()) -> Run:
        """Return the ended run of a recipe: found, resumed if it was interrupted or failed, or trained.

        Raises:
            KeyboardInterrupt: A signal stopped the training, which is saved.
            LockedError: Another process is training it.
        """
        found = self.find(recipe)
        if found is not None:
            return found
        path = self.path(recipe)
        with Run(path).lock():  # before another look: until then, another process may have trained it
            return self.find(recipe) or self._train(recipe, path, callbacks)

    def _train(self, recipe: Recipe, path: Path, callbacks: Sequence[Callback]) -> Run:
        if (path / "recipe.yaml").is_file():
            # Where the same data lies by now, and what changes no number, is the asking recipe's to say.
            run = resume(path, {"data.source": recipe.data.source}, device=recipe.device, callbacks=callbacks)
        else:
            run = train(recipe.model_copy(update={"out": str(path)}), callbacks=callbacks)
        if run.status["status"] not in ENDED:
            raise KeyboardInterrupt(f"'{path}' was interrupted; it continues when it is asked for again")
        return run

    def _settle(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the digest of the weights that it starts from, which are read once."""
        if recipe.init.source is None or recipe.init.digest is not None:
            return recipe
        from vitclinic.training.init import read_initial_weights, settle

        key = recipe.model_dump_json()
        if key not in self._settled:
            self._settled[key] = settle(recipe, read_initial_weights(recipe))[0]
        return self._settled[key]

    def _data_digest(self, recipe: Recipe) -> str:
        """Return the digest of a recipe's data, which is opened once however many recipes share it."""
        key = (recipe.data.model_dump_json(), recipe.image_size, recipe.model.in_chans)
        if key not in self._data_digests:
            data = open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans)
            self._data_digests[key] = data.digest
        return self._data_digests[key]


log = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds until the next attempt at a run that another process is training."""


@dataclass(frozen=True)
class Measured:
    """The numbers that were measured on a run."""

    numbers: dict[str, float]
    """By measure; NaN where there is none."""
    missing: dict[str, str]
    """The reason, for each measure without a number."""


After = Callable[[Run, DataConfig], Measured]
"""A function that measures an ended run on its data, in the process that trained it; it must be picklable."""


@dataclass(frozen=True)
class Outcome:
    """The end of a recipe's run. A divergence is a result; a failure means that there is none."""

    recipe: Recipe
    status: Literal["finished", "diverged", "measured", "failed"]
    path: Path | None = None
    reason: str | None = None
    measured: Measured = field(default_factory=lambda: Measured({}, {}))
    """Empty unless `run_all` was given `after`."""

    @property
    def run(self) -> Run:
        """The run directory; only of a run that did not fail."""
        assert self.path is not None
        return Run.open(self.path)


def run_all(
    recipes: Sequence[Recipe],
    pool: Pool,
    *,
    processes: int = 1,
    threads: int | None = None,
    ray: str | None = None,
    slurm: str | None = None,
    gpus: int | None = None,
    after: After | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Outcome]:
    """Train recipes that the pool does not have yet, each once, and return the outcomes of all in their order.

    One that fails is reported, and the others go on. One that another command is training comes last and is waited for;
    should that command die, it is continued here. Ctrl-C saves all runs at work, and is raised.

    Args:
        recipes: What to train; a recipe may be listed twice.
        pool: Where runs are found and stored.
        processes: How many to train at a time.
        threads: Of each process; its share of the cores unless given. A run's numbers depend in their last bits on
            the number of its threads, and not on how many runs are trained beside it.
        ray: The address of a Ray cluster to train on, `threads` cores per run; `auto` finds a running one.
        slurm: Options of SLURM jobs to train in, such as `partition=gpu,time=8h`; `auto` for none, `local` to try.
        gpus: Of each run on a cluster: unless given, one on a Ray cluster that has any, and what `slurm` says.
        after: Called with each ended run and its data, also with those that were found.
        callbacks: Their `on_progress` receives the runs done, fractions included, and `on_run` each run that ends.
    """
    callback = CallbackList(callbacks)
    ended: dict[Path, Outcome] = {}
    waiting: dict[Path, Recipe] = {}
    for recipe in recipes:
        path = pool.path(recipe)
        found = pool.find(recipe) if after is None else None
        if found is None:
            waiting[path] = recipe
        elif path not in ended:
            ended[path] = describe_run(recipe, found)
            callback.on_run(ended[path])
    tally = Tally(len(ended), len(ended) + len(waiting), callback)
    if ray is not None:
        from vitclinic.experiments.ray_cluster import run_on_cluster

        ended |= run_on_cluster(waiting, pool.folder, ray, threads or 1, gpus, after, tally)
    elif slurm is not None:
        from vitclinic.experiments.slurm import run_on_slurm

        ended |= run_on_slurm(waiting, pool.folder, slurm, threads or 1, gpus, after, tally)
    elif processes == 1:
        ended |= run_in_turn(waiting, pool, after, tally)
    else:
        from vitclinic.experiments.workers import run_in_processes

        share = threads or max(1, (os.cpu_count() or 1) // processes)
        ended |= run_in_processes(waiting, pool.folder, min(processes, len(waiting)), share, after, tally)
    return [ended[pool.path(recipe)] for recipe in recipes]


def run_in_turn(waiting: Mapping[Path, Recipe], pool: Pool, after: After | None, tally: Tally) -> dict[Path, Outcome]:
    """Train all that is `waiting` in this process, and return the outcomes."""
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
    """Runs to train, in order; one that another process is training goes to the end and rests before its next turn.

    The latest comes last, so that no run in the queue is ready unless the first one is.
    """

    def __init__(self, waiting: Mapping[Path, Recipe]) -> None:
        self.runs = deque((path, recipe, -math.inf) for path, recipe in waiting.items())
        self.told = False

    def rest(self) -> float:
        """Return the seconds until the first may be taken."""
        return max(0.0, self.runs[0][2] - time.monotonic())

    def take(self) -> tuple[Path, Recipe]:
        path, recipe, _ = self.runs.popleft()
        return path, recipe

    def put_back(self, path: Path, recipe: Recipe) -> None:
        self.runs.append((path, recipe, time.monotonic() + LOOK_AGAIN))
        if not self.told:
            log.warning("Another process is training some of these runs: waiting for it after all others are done.")
        self.told = True


def attempt(pool: Pool, recipe: Recipe, callbacks: Sequence[Callback], after: After | None = None) -> Outcome:
    """Train and measure a recipe, and return its outcome, also if that is a failure.

    Raises:
        KeyboardInterrupt: A signal came, even after the last step.
        LockedError: Another process is training or measuring it.
    """
    with listen_for_signals() as interrupt:
        try:
            outcome = _catch(recipe, lambda: describe_run(recipe, pool.train(recipe, callbacks)))
        finally:
            if interrupt.signal is not None:
                raise KeyboardInterrupt(interrupt.signal)
    if after is None or outcome.status == "failed":
        return outcome
    return _catch(recipe, lambda: replace(outcome, measured=_measure(outcome.run, recipe, after)))


def _measure(run: Run, recipe: Recipe, after: After) -> Measured:
    """Measure a run under its lock: two at a time would do the work twice and write the same files."""
    with run.lock():
        return after(run, recipe.data)


def _catch(recipe: Recipe, action: Callable[[], Outcome]) -> Outcome:
    """Return what the action returns, or its failure: whatever one run dies of, the others go on."""
    try:
        return action()
    except LockedError:
        raise
    except Exception as error:  # a network, a probe or a disk may raise anything
        log.info("a run failed", exc_info=error)
        return Outcome(recipe, "failed", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)


def describe_run(recipe: Recipe, run: Run) -> Outcome:
    """Return the outcome of an ended run."""
    status = run.status
    return Outcome(recipe, status["status"], run.path, status.get("reason"))


class Tally:
    """The progress of all runs together."""

    def __init__(self, done: int, total: int, callback: Callback) -> None:
        self.done, self.total, self.callback = done, total, callback
        self.shares: dict[Path, float] = {}
        self._tell()

    def advance(self, path: Path, share: float) -> None:
        self.shares[path] = share
        self._tell()

    def end(self, path: Path, outcome: Outcome) -> None:
        self.shares.pop(path, None)
        self.done += 1
        self.callback.on_run(outcome)
        self._tell()

    def _tell(self) -> None:
        self.callback.on_progress("runs", self.done + sum(self.shares.values()), self.total)


class StepShare(Callback):
    """A callback of training that tells the tally which share of the steps is done."""

    def __init__(self, tally: Tally, path: Path) -> None:
        self.tally, self.path = tally, path

    def on_step(self, trainer: Trainer) -> None:
        self.tally.advance(self.path, trainer.step / trainer.total_steps)
