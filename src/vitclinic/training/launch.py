"""Train a valid recipe: join the processes, open the data, claim the run directory, fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import join_processes, pick_device
from vitclinic._core.errors import RunError
from vitclinic.data import Dataset, open_data
from vitclinic.training.budget import total_steps
from vitclinic.training.callbacks import TensorBoard, TrajectoryRecorder
from vitclinic.training.interrupts import listen_for_signals
from vitclinic.training.recipe import Recipe
from vitclinic.training.run import Run
from vitclinic.training.session import Session
from vitclinic.training.trainer import Trainer


def launch(recipe: Recipe, run: Run | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train a recipe in a new directory, or resume a run; every process calls this.

    Args:
        recipe: The validated recipe.
        run: The run to resume; None starts a new one.
        callbacks: Notified of data reading, steps, epochs, rows of metrics and the end.

    Returns:
        The finished, interrupted or diverged run.
    """
    device = pick_device(recipe.device)
    with ExitStack() as stack:
        distributed = stack.enter_context(join_processes(device))
        stack.enter_context(torch.random.fork_rng(enabled=True))
        dataset = distributed.leader_first(
            lambda: _open_data(recipe, CallbackList(callbacks if distributed.is_leader else ()))
        )
        # Every mistake in the recipe must surface before the directory is created. Only the leading process checks
        # and creates it: the others would find it already there.
        path = Path(distributed.leader_only(lambda: str(_choose_path(recipe, run, dataset))))
        if recipe.logging.tensorboard and distributed.is_leader:
            callbacks = [*callbacks, TensorBoard(path / "tensorboard")]
        if recipe.logging.trajectory is not None and distributed.is_leader:
            callbacks = [*callbacks, TrajectoryRecorder(path, recipe.logging.trajectory)]
        steps = run.status.get("total_steps") if run is not None else None
        steps = steps or total_steps(recipe, dataset, distributed, device)
        trainer = Trainer(recipe, dataset, steps, distributed, device)
        distributed.leader_only(lambda: _claim(path, recipe, run, dataset, stack))
        return _fit(Run(path), trainer, CallbackList(callbacks))


def _choose_path(recipe: Recipe, run: Run | None, dataset: Dataset) -> Path:
    """Return the directory to train in: the run's own, or a new one (never one that already holds a run)."""
    if run is None:
        return _new_path(recipe, dataset)
    if run.data_facts["digest"] != dataset.digest:
        raise RunError(f"The data of '{run.path}' has changed since the run started, so it cannot be resumed.")
    return run.path


def _claim(path: Path, recipe: Recipe, run: Run | None, dataset: Dataset, stack: ExitStack) -> None:
    """Lock the directory for as long as `stack` is open, and create the run if it is new."""
    stack.enter_context(Run(path).lock())
    if run is None:
        Run.create(path, recipe, dataset)


def _fit(run: Run, trainer: Trainer, callback: Callback) -> Run:
    leads = trainer.distributed.is_leader
    try:
        with listen_for_signals() as interrupt:
            Session(run, trainer, callback, interrupt).fit()
    except BaseException as error:
        if leads:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run.write_status(status, reason=reason)
        raise
    finally:
        trainer.close()
    return run


def _open_data(recipe: Recipe, callback: Callback) -> Dataset:
    return open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans, progress=callback.on_progress)


def _new_path(recipe: Recipe, dataset: Dataset) -> Path:
    """Return `out`, or a path named after data, model and digest; never overwrite an existing run."""
    digest = recipe.digest(dataset.digest)
    name = "-".join([Path(dataset.name).name, recipe.model.name, digest[:8]])
    path = Path(recipe.out).expanduser() if recipe.out else Path("runs") / re.sub(r"[^\w.,=-]+", "-", name)
    if (path / "recipe.yaml").is_file():
        status = Run(path).status
        advice = "choose another out=" if status["status"] in ("finished", "diverged") else f"continue: --resume {path}"
        raise RunError(f"'{path}' already holds a run ({status['status']}): {advice}.")
    Run(path).refuse_foreign_files()
    return path
