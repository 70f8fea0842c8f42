"""The start of a training: processes, data, the run directory, and what is said of the recipe beforehand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import is_lost_process, join_processes, pick_device
from vitclinic._core.errors import DamagedFileError, LockedError, LostProcessError, ModelError, RecipeError, RunError
from vitclinic._core.io import expand_path, find_path
from vitclinic._core.memory import is_out_of_memory
from vitclinic.data import Dataset, open_data
from vitclinic.training.budget import fit_size, total_steps
from vitclinic.training.callbacks import SampleRecorder, TrajectoryRecorder
from vitclinic.training.init import read_initial_weights, settle
from vitclinic.training.loop import Session
from vitclinic.training.notices import find_unheeded
from vitclinic.training.recipe import LoggingConfig, Recipe
from vitclinic.training.run import Run
from vitclinic.training.signals import listen_for_signals
from vitclinic.training.sinks import make_sinks
from vitclinic.training.token_label_teacher import add_token_labels
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
        init = None
        if run is not None:
            distributed.leader_only(lambda: _refuse_changed_files(run))
        if run is None or not run.checkpoints.names():  # a checkpoint has all that is needed to go on
            init = distributed.leader_first(lambda: read_initial_weights(recipe))
        recipe, settled = settle(recipe, init)
        dataset = distributed.leader_first(
            lambda: _open_data(recipe, CallbackList(callbacks if distributed.is_leader else ()))
        )
        recipe, dataset = distributed.leader_first(
            lambda: add_token_labels(
                recipe, dataset, device, CallbackList(callbacks if distributed.is_leader else ()).on_progress
            )
        )
        recipe, fitted = fit_size(recipe, dataset, distributed, device)
        # Every mistake in the recipe must surface before the directory is created. Only the leading process checks
        # and creates it: the others would find it already there.
        path = Path(distributed.leader_only(lambda: str(_choose_path(recipe, run, dataset))))
        if distributed.is_leader:
            callbacks = [*callbacks, *_make_loggers(recipe.logging, path)]
        steps = _planned_steps(recipe, run) or total_steps(recipe, dataset, distributed, device)
        trainer = Trainer(recipe, dataset, steps, distributed, device, init)
        trainer.notices = [*settled, *fitted, *trainer.notices, *find_unheeded(trainer)]
        distributed.leader_only(lambda: _claim(path, trainer, run, stack))
        return _fit(Run(path), trainer, CallbackList(callbacks))


def _planned_steps(recipe: Recipe, run: Run | None) -> int | None:
    """Return the number of steps that a run with `max_time` goes on with; what its checkpoint says comes before it."""
    if run is None or recipe.max_time is None or not run.checkpoints.names():
        return None
    return run.status.get("total_steps")


def _make_loggers(config: LoggingConfig, folder: Path) -> list[Callback]:
    """Return the callbacks that a recipe's `logging` asks for."""
    found = make_sinks(config, folder)
    if config.trajectory is not None:
        found.append(TrajectoryRecorder(folder, config.trajectory))
    return [*found, SampleRecorder(folder)] if config.samples else found


def _refuse_changed_files(run: Run) -> None:
    """Raise a RunError if the run's files are not those that the checkpoint to go on from was made with."""
    for name in ("last", "previous"):
        if name in run.checkpoints.names():
            try:
                return run.refuse_changed_files(name)
            except DamagedFileError:  # told where it is read
                continue


def _choose_path(recipe: Recipe, run: Run | None, dataset: Dataset) -> Path:
    """Return the directory to train in: the run's own, or a new one (never one that already holds a run)."""
    if run is None:
        return _new_path(recipe, dataset)
    if run.data_facts["digest"] != dataset.digest:
        raise RunError(f"The data of '{run.path}' has changed since the run started, so it cannot be resumed.")
    return run.path


def _claim(path: Path, trainer: Trainer, run: Run | None, stack: ExitStack) -> None:
    """Lock the directory for as long as `stack` is open, and create the run if it is new."""
    stack.enter_context(Run(path).lock())
    if run is None:
        loaded = None if trainer.loaded is None else trainer.loaded.plain()
        Run.create(path, trainer.recipe, trainer.dataset, loaded)


def _fit(run: Run, trainer: Trainer, callback: Callback) -> Run:
    leads = trainer.distributed.is_leader
    try:
        with listen_for_signals() as interrupt:
            Session(run, trainer, callback, interrupt).fit()
    except BaseException as error:
        if trainer.distributed.size > 1 and is_lost_process(error):
            raise _leave(run, trainer) from error
        if leads:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            run.write_status(status, reason=reason)
        if is_out_of_memory(error):
            raise ModelError("Out of memory: choose a smaller network or batch_size, or free some.") from error
        raise
    finally:
        trainer.close()
    return run


def _leave(run: Run, trainer: Trainer) -> LostProcessError:
    """Mark a run as interrupted whose processes are not all there any more, and return the sentence to raise.

    The leading process has the run's lock; if that is the one that is lost, another one gets it.
    """
    with suppress(LockedError), run.lock():
        run.write_status("interrupted", reason=f"another process was lost after step {trainer.step}")
    return LostProcessError(
        f"One of the {trainer.distributed.size} processes is gone, and the others cannot go on without it; the run is"
        f" kept up to its last checkpoint: start them again with vitclinic train --resume {shlex.quote(str(run.path))}."
    )


def _open_data(recipe: Recipe, callback: Callback) -> Dataset:
    return open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans, progress=callback.on_progress)


def _new_path(recipe: Recipe, dataset: Dataset) -> Path:
    """Return `out`, or a path named after data, model and digest; never overwrite an existing run."""
    digest = recipe.digest(dataset.digest)
    name = "-".join([Path(dataset.name).name, recipe.model.name, digest[:8]])
    path = expand_path(recipe.out, RecipeError) if recipe.out else Path("runs") / re.sub(r"[^\w.,=-]+", "-", name)
    if find_path(str(path / "recipe.yaml"), RunError, "a run") is not None:
        status = Run(path).status
        ended = status["status"] in ("finished", "diverged")
        advice = f"{'' if ended else f'resume it (vitclinic train --resume {path}), or '}choose another `out`"
        raise RunError(f"'{path}' already holds a run ({status['status']}): {advice}.")
    Run(path).refuse_foreign_files()
    return path
