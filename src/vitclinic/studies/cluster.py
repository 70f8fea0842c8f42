"""Runs as tasks of a Ray cluster, whose machines share the folder of the pool.

A task trains and measures one run. Ray starts a task again whose worker is lost, elsewhere if need be; the run then
goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitclinic.errors import MissingExtraError, RunError
from vitclinic.studies.runner import After, Outcome, Tally, attempt
from vitclinic.studies.store import Pool
from vitclinic.training import Recipe

_ATTEMPTS_AFTER_A_LOSS = 3


def in_cluster(
    waiting: Mapping[Path, Recipe], folder: Path, address: str, threads: int, after: After | None, tally: Tally
) -> dict[Path, Outcome]:
    """The outcomes of all that is `waiting`; the cluster at `address` is joined, and left as it was."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise RunError(f"There is no Ray cluster at '{address}': {str(error).splitlines()[0]}") from error
    task: Any = ray.remote(num_cpus=threads, max_retries=_ATTEMPTS_AFTER_A_LOSS)(_task)
    pending = {task.remote(recipe, folder.resolve(), threads, after): path for path, recipe in waiting.items()}
    ended: dict[Path, Outcome] = {}
    try:
        while pending:
            (done, *_), _ = ray.wait(list(pending))
            path = pending.pop(done)
            ended[path] = _outcome(ray, done, waiting[path])
            tally.end(path, ended[path])
    finally:
        for unfinished in pending:
            ray.cancel(unfinished)  # as Ctrl-C would: the run is saved
        if ours:
            ray.shutdown()
    return ended


def _outcome(ray: Any, done: Any, recipe: Recipe) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayError as error:
        return Outcome(recipe, "failed", reason=f"its worker was lost: {str(error).splitlines()[0]}")
    return outcome


def _task(recipe: Recipe, folder: Path, threads: int, after: After | None) -> Outcome:
    import torch

    torch.set_num_threads(threads)
    return attempt(Pool(folder), recipe, (), after)
