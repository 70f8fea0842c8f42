"""Worker processes that train one run at a time, and the leader that hands runs to them.

A worker has its own number of threads. It receives recipes through a pipe and answers with the share of steps done and
with how a run ended. If it dies, the run it was training counts as failed, and another worker takes its place. If the
leader dies, it saves and stops. A run that another command is training is given back.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from vitclinic._core.callback import Callback
from vitclinic._core.errors import LockedError
from vitclinic.experiments.runner import After, Outcome, Pool, Queue, Tally, attempt
from vitclinic.training import Recipe

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer

_TELL_EVERY = 0.2
"""Seconds between two reports of a worker on its progress."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_in_processes(
    waiting: Mapping[Path, Recipe], folder: Path, processes: int, threads: int, after: After | None, tally: Tally
) -> dict[Path, Outcome]:
    """Train all that is `waiting` with `processes` workers, and return the outcomes."""
    queue = Queue(waiting)
    ended: dict[Path, Outcome] = {}
    workers: list[_Worker] = []
    try:
        while queue.runs or any(worker.path for worker in workers):
            # One that died with a run in hand has that still to say: its end of the pipe is closed.
            workers = [worker for worker in workers if worker.path is not None or worker.process.is_alive()]
            while len(workers) < min(processes, len(queue.runs) + sum(worker.path is not None for worker in workers)):
                workers.append(_Worker(folder, threads, after))
            for worker in workers:
                if worker.path is None and queue.runs and not queue.rest():
                    worker.give(*queue.take())
            for worker in _wait_for_news(workers, queue.rest() if queue.runs else None):
                word = worker.hear(tally)
                if word is None or worker.path is None or worker.recipe is None:
                    continue
                if isinstance(word, LockedError):
                    queue.put_back(worker.path, worker.recipe)
                else:
                    ended[worker.path] = word
                    tally.end(worker.path, word)
                worker.path = None
    finally:
        _dismiss(workers)
    return ended


class _Worker:
    """A worker as its leader sees it."""

    def __init__(self, folder: Path, threads: int, after: After | None) -> None:
        context = mp.get_context("spawn")  # a fork would inherit torch's threads in whatever state they are
        self.connection, theirs = context.Pipe()
        # No daemon, which could have no processes of its own to load data; it ends with the leader all the same.
        self.process = context.Process(target=_serve, args=(theirs, folder, threads, after))
        with _environment({name: str(threads) for name in _THREADS}):
            self.process.start()
        theirs.close()
        self.path: Path | None = None
        self.recipe: Recipe | None = None

    def give(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe
        with suppress(OSError):  # one that has just died is found dead
            self.connection.send(recipe)

    def hear(self, tally: Tally) -> Outcome | LockedError | None:
        """Return how its run ended, or that it could not begin; a failure if it died; None for mere progress."""
        try:
            word = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode in (0, -signal.SIGINT, -signal.SIGTERM):
                raise KeyboardInterrupt(-self.process.exitcode or signal.SIGINT) from None  # told to stop, and saved
            assert self.recipe is not None
            reason = f"its process died (exit code {self.process.exitcode}); perhaps it ran out of memory"
            return Outcome(self.recipe, "failed", reason=reason)
        if isinstance(word, Outcome | LockedError):
            return word
        if self.path is not None:
            tally.advance(self.path, word)
        return None


def _wait_for_news(workers: list[_Worker], rest: float | None) -> list[_Worker]:
    """Return the workers that have sent something, or have died, which closes their end of the pipe.

    If some are idle, wait no longer than `rest` seconds, when a run is ready for them.
    """
    busy = {worker.connection: worker for worker in workers if worker.path is not None}
    idle = len(busy) < len(workers)
    return [busy[ready] for ready in wait(list(busy), rest if idle else None) if isinstance(ready, Connection)]


def _dismiss(workers: list[_Worker]) -> None:
    """Stop all workers, the busy ones after saving; a second Ctrl-C meanwhile is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if _in_main_thread() else None
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join()
        worker.connection.close()
    if before is not None:
        signal.signal(signal.SIGINT, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, folder: Path, threads: int, after: After | None) -> None:
    """Train what comes through the pipe, until it closes or a signal comes."""
    import torch

    torch.set_num_threads(threads)
    threading.Thread(target=_stop_with_the_leader, daemon=True).start()
    pool = Pool(folder)
    with suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            recipe: Recipe = connection.recv()
            try:
                connection.send(attempt(pool, recipe, [_Reporter(connection)], after))
            except LockedError as locked:
                connection.send(locked)


def _stop_with_the_leader() -> None:
    leader = mp.parent_process()
    assert leader is not None
    leader.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Reporter(Callback):
    """A callback of training that tells the leader which share of the steps is done."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.told = 0.0

    def on_step(self, trainer: Trainer) -> None:
        if time.monotonic() - self.told > _TELL_EVERY:
            self.told = time.monotonic()
            with suppress(OSError):  # a leader that is gone: its end is noticed elsewhere
                self.connection.send(trainer.step / trainer.total_steps)
