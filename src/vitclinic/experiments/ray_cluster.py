"""Runs as tasks of a Ray cluster, whose machines share the folder of the pool.

A task trains and measures one run. If its worker is lost, Ray starts the task again, elsewhere if need be, and the run
continues from its last checkpoint. Progress is read from the folders of the runs.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitclinic._core.errors import LockedError, MissingExtraError, RunError
from vitclinic.experiments.ray_machines import OWN_RAY_GONE, Machines, parse_address
from vitclinic.experiments.runner import LOOK_AGAIN, After, Outcome, Pool, Tally, attempt
from vitclinic.training import Recipe, Run
from vitclinic.training.rows import parse_row

_ATTEMPTS_AFTER_A_LOSS = 5
_LOOK_EVERY = 0.5
"""Seconds between two looks at the progress."""
_SAVED_WITHIN = 30.0
"""Seconds that runs have to save themselves when everything is stopped."""


def run_on_cluster(
    waiting: Mapping[Path, Recipe],
    folder: Path,
    address: str,
    threads: int,
    gpus: int | None,
    after: After | None,
    tally: Tally,
) -> dict[Path, Outcome]:
    """Train all that is `waiting` on the cluster at `address`, and return the outcomes."""
    with redirect_stdout(sys.stderr):  # where Ray's own messages about lost workers belong
        return _run_tasks(waiting, folder, address, threads, gpus, after, tally)


def _run_tasks(
    waiting: Mapping[Path, Recipe],
    folder: Path,
    address: str,
    threads: int,
    gpus: int | None,
    after: After | None,
    tally: Tally,
) -> dict[Path, Outcome]:
    ray, joined = _join(address)
    needed = choose_resources([node["Resources"] for node in ray.nodes() if node["Alive"]], threads, gpus)
    machines = Machines(ray, needed)
    task: Any = ray.remote(**needed, max_retries=_ATTEMPTS_AFTER_A_LOSS)(_run_task)
    pending: dict[Any, Path] = {}
    ended: dict[Path, Outcome] = {}
    try:
        for path, recipe in waiting.items():
            pending[task.remote(resolve_data(recipe), folder.resolve(), threads, after)] = path
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_LOOK_EVERY)
            for one in done:
                path = pending.pop(one)
                ended[path] = _get_outcome(ray, one, waiting[path])
                tally.end(path, ended[path])
            _update_progress(pending.values(), tally)
            machines.look()
    finally:
        _stop(ray, list(pending))
        if joined:
            ray.shutdown()
    return ended


def _join(address: str) -> tuple[Any, bool]:
    """Return Ray, and True if the cluster was joined just now."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Training on a Ray cluster", "ray") from error
    if ray.is_initialized():
        return ray, False
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"There is no Ray cluster at '{address}': {str(error).splitlines()[0]}") from error
    return ray, True


def _knock(address: str) -> None:
    """Fail at once if nobody answers, where Ray would wait for a quarter of an hour."""
    place = parse_address(address)
    if place is not None:
        socket.create_connection(place, timeout=10).close()


def choose_resources(machines: Sequence[Mapping[str, float]], cores: int, gpus: int | None) -> dict[str, int]:
    """Return what Ray is to keep for each run; one GPU, unless it is said how many, where a machine has any.

    Args:
        machines: The resources of each machine of the cluster.
        cores: Of a run.
        gpus: Of a run.

    Raises:
        RunError: No machine has as many, so that Ray would wait forever.

    Example:
        >>> choose_resources([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 16.0}], 4, None)
        {'num_cpus': 4, 'num_gpus': 1}
    """
    if gpus is None:
        gpus = int(any(one.get("GPU", 0) >= 1 and one.get("CPU", 0) >= cores for one in machines))
    if not any(one.get("CPU", 0) >= cores and one.get("GPU", 0) >= gpus for one in machines):
        has = ", ".join(sorted({f"{one.get('CPU', 0):g} and {one.get('GPU', 0):g}" for one in machines})) or "none"
        raise RunError(
            f"No machine of the Ray cluster has {cores} cores and {gpus} GPUs for a run (they have {has}): ask"
            " for fewer."
        )
    return {"num_cpus": cores, "num_gpus": gpus}


def resolve_data(recipe: Recipe) -> Recipe:
    """Return the recipe for a process in another folder; where its data lies is no part of its digest."""
    source = Path(recipe.data.source).expanduser()
    if not source.exists():
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": str(source.resolve())})})


def _get_outcome(ray: Any, done: Any, recipe: Recipe) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.LocalRayletDiedError as error:  # nothing else can be started either
        raise RunError(OWN_RAY_GONE) from error
    except ray.exceptions.RayError as error:
        return Outcome(recipe, "failed", reason=f"its worker was lost: {str(error).splitlines()[0]}")
    return replace(outcome, recipe=recipe)


def _update_progress(paths: Iterable[Path], tally: Tally) -> None:
    for path in paths:
        share = read_progress(Run(path))
        if share is not None:
            tally.advance(path, share)


def read_progress(run: Run) -> float | None:
    """Return the share of its steps that a run has recorded; None before it has begun."""
    if not (run.path / "status.json").is_file():
        return None
    try:
        total = run.status["total_steps"]
        with (run.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            row = parse_row(file.read().split(b"\n")[-2])
        return None if row is None else float(row["step"] / total)
    except (OSError, RunError, LookupError, TypeError, ArithmeticError):
        return None


def _stop(ray: Any, unfinished: list[Any]) -> None:
    """Cancel as Ctrl-C would: runs at work are saved before their processes end."""
    for one in unfinished:
        ray.cancel(one)
    if unfinished:
        ray.wait(unfinished, num_returns=len(unfinished), timeout=_SAVED_WITHIN)


def _run_task(recipe: Recipe, folder: Path, threads: int, after: After | None) -> Outcome:
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            return attempt(Pool(folder), recipe, (), after)
        except LockedError:
            time.sleep(LOOK_AGAIN)
