"""Runs as jobs of a SLURM cluster, through submitit: one job array, whose machines share the folder of the pool.

A job trains and measures one run. Before its time is up, or when it is preempted, SLURM signals it: it saves, puts
itself back into the queue and goes on from there. Progress is read from the folders of the runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from vitclinic._core.errors import LockedError, MissingExtraError, RecipeError, RunError, did_you_mean
from vitclinic._core.time import seconds
from vitclinic.experiments.ray_cluster import read_progress, resolve_data
from vitclinic.experiments.runner import LOOK_AGAIN, After, Outcome, Pool, Tally, attempt
from vitclinic.training import Recipe, Run
from vitclinic.training.signals import is_listening

_LOOK_EVERY = 2.0
"""Seconds between two looks at the jobs."""
_MINUTES = 240
"""Time of a job unless given; submitit's own default is 5."""
_MOST_TURNS = 1000
"""How often a job may be queued again when its time is up; submitit's own default is 3."""
LOCAL = "local"
"""Instead of options: processes of this machine, to try it out."""
_OPTIONS = {
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "constraint": "slurm_constraint",
    "time": "timeout_min",
    "memory": "mem_gb",
    "gpus": "gpus_per_node",
    "jobs": "slurm_array_parallelism",
}
"""What users write, and what submitit calls it."""
_NUMBERS = ("memory", "gpus", "jobs")


def parse_options(text: str) -> dict[str, Any]:
    """Return submitit's parameters for `partition=gpu,time=8h,gpus=1`; none for `auto` and `local`.

    Example:
        >>> parse_options("partition=gpu,time=8h,gpus=1")
        {'slurm_partition': 'gpu', 'timeout_min': 480, 'gpus_per_node': 1}
    """
    found: dict[str, Any] = {}
    for part in () if text in ("auto", LOCAL) else text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and value) or name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS) or f" Known are {', '.join(_OPTIONS)}."
            raise RecipeError(f"slurm: '{part}' is not an option such as partition=gpu.{hint}")
        if name in _NUMBERS and not value.isdecimal():
            raise RecipeError(f"slurm: write a whole number, as in {name}=1 (got '{value}').")
        found[_OPTIONS[name]] = _minutes(value) if name == "time" else int(value) if name in _NUMBERS else value
    return found


def describe_job(options: str, cores: int, gpus: int | None) -> dict[str, Any]:
    """Return submitit's parameters of one run's job.

    Example:
        >>> describe_job("time=1h", 4, 1)
        {'name': 'vitclinic', 'cpus_per_task': 4, 'timeout_min': 60, 'gpus_per_node': 1}
    """
    found = {"name": "vitclinic", "cpus_per_task": cores, "timeout_min": _MINUTES, **parse_options(options)}
    if gpus is not None and found.setdefault(_OPTIONS["gpus"], gpus) != gpus:
        raise RecipeError(f"slurm: gpus is {found[_OPTIONS['gpus']]} in '{options}' and {gpus} beside it; say it once.")
    return found


def _minutes(text: str) -> int:
    try:
        return max(1, round(seconds(text) / 60))
    except ValueError as error:
        raise RecipeError(f"slurm: {error}, as in time=8h (got '{text}').") from None


def run_on_slurm(
    waiting: Mapping[Path, Recipe],
    folder: Path,
    options: str,
    threads: int,
    gpus: int | None,
    after: After | None,
    tally: Tally,
) -> dict[Path, Outcome]:
    """Train all that is `waiting` as jobs of the cluster, and return the outcomes."""
    executor = _prepare(folder, options, threads, gpus)
    jobs: dict[Path, Any] = {}
    ended: dict[Path, Outcome] = {}
    try:
        with executor.batch():  # one job array
            for path, recipe in waiting.items():
                jobs[path] = executor.submit(Task(resolve_data(recipe), folder.resolve(), threads, after))
        while pending := [path for path in jobs if path not in ended]:
            time.sleep(_LOOK_EVERY)
            for path in pending:
                share = read_progress(Run(path))
                if jobs[path].done():
                    ended[path] = _get_outcome(jobs[path], waiting[path])
                    tally.end(path, ended[path])
                elif share is not None:
                    tally.advance(path, share)
    finally:
        for path, job in jobs.items():
            if path not in ended:
                job.cancel(check=False)  # a run at work is saved
    return ended


def _prepare(folder: Path, options: str, threads: int, gpus: int | None) -> Any:
    parameters = describe_job(options, threads, gpus)
    try:
        import submitit
    except ImportError as error:
        raise MissingExtraError("Training on a SLURM cluster", "slurm") from error
    cluster = LOCAL if options == LOCAL else "slurm"
    try:
        jobs = folder.resolve().parent / "jobs"
        executor = submitit.AutoExecutor(folder=jobs, cluster=cluster, slurm_max_num_timeout=_MOST_TURNS)
    except RuntimeError as error:  # no sbatch
        raise RunError(
            "There is no SLURM here (no command srun); run this on a machine that submits jobs, or use slurm=local."
        ) from error
    executor.update_parameters(**parameters)
    return executor


def _get_outcome(job: Any, recipe: Recipe) -> Outcome:
    error = job.exception()
    if error is None:
        outcome: Outcome = job.result()
        return replace(outcome, recipe=recipe)
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return Outcome(recipe, "failed", reason=f"its job {job.job_id} was lost: {last}")


class Task:
    """One run as a job; submitit calls it, and asks it for the job that goes on after a preemption."""

    def __init__(self, recipe: Recipe, folder: Path, threads: int, after: After | None) -> None:
        self.recipe, self.folder, self.threads, self.after = recipe, folder, threads, after

    def __call__(self) -> Outcome:
        """Train and measure the run; on SLURM's signal save it, and queue the job again."""
        import torch
        from submitit.core.job_environment import JobEnvironment

        torch.set_num_threads(self.threads)
        warning = JobEnvironment._usr_sig()
        requeue: Any = signal.getsignal(warning)  # submitit's: puts the job back into the queue, and ends
        signal.signal(warning, lambda number, frame: _save_or(requeue, number, frame))
        while True:
            try:
                return attempt(Pool(self.folder), self.recipe, (), self.after)
            except LockedError:
                time.sleep(LOOK_AGAIN)
            except KeyboardInterrupt:
                requeue(int(warning), None)
                raise

    def checkpoint(self) -> Any:
        """Return the job that goes on: the same one, which finds its run half done."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _save_or(requeue: Any, number: int, frame: FrameType | None) -> None:
    """Ask a training to save and stop; what is measured is stored already, and can be left at once."""
    if is_listening():
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        requeue(number, frame)
