"""The verb `train`: from a recipe to a run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import join_processes, pick_device
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.data import Dataset, open_data
from vitclinic.training.budget import total_steps
from vitclinic.training.callbacks import TensorBoard, TrajectoryRecorder
from vitclinic.training.interrupts import listening
from vitclinic.training.recipe import Recipe, build_recipe
from vitclinic.training.run import Run
from vitclinic.training.session import Session
from vitclinic.training.trainer import Trainer


def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *words: str,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train by a recipe (a shipped one's name, a file, plain data or a `Recipe`), changed by `key=value` words.

    Returns the finished, interrupted or diverged run. Under torchrun every process calls this.

    Example:
        >>> run = train("shapes", "epochs=1", "out=/tmp/run")  # doctest: +SKIP
        >>> run.results["test"]["accuracy"]  # doctest: +SKIP
    """
    if isinstance(recipe, Recipe):
        if words:
            raise RecipeError("Words change a recipe that is still plain data: pass them to build_recipe.")
        resolved = recipe
    else:
        resolved = build_recipe(recipe, words)
    return _train_together(resolved, None, callbacks)


def resume(path: str | Path, *words: str, callbacks: Sequence[Callback] = ()) -> Run:
    """Continue a run from its newest whole checkpoint, to the same numbers as without the interruption.

    Only what does not change the numbers may be given anew: workers, device, logging, and where the same data now lies
    (`data=`).
    """
    run = Run.open(path)
    recipe = build_recipe(run.recipe.plain(), words)
    changed = {key for key, value in recipe if value != getattr(run.recipe, key)}
    if recipe.digest("") != run.recipe.digest("") or "out" in changed:
        raise RecipeError(f"A resumed run keeps its recipe; {', '.join(sorted(changed))} cannot change.")
    if run.status["status"] == "finished":
        raise RunError(f"'{path}' is finished; there is nothing to resume.")
    if run.status["status"] == "diverged":
        raise RunError(f"'{path}' diverged ({run.status['reason']}); it would again. Change the recipe instead.")
    return _train_together(recipe, run, callbacks)


def _train_together(recipe: Recipe, run: Run | None, callbacks: Sequence[Callback]) -> Run:
    device = pick_device(recipe.device)
    with ExitStack() as stack:
        distributed = stack.enter_context(join_processes(device))
        stack.enter_context(torch.random.fork_rng(enabled=True))
        dataset = distributed.leader_first(
            lambda: _open_data(recipe, CallbackList(callbacks if distributed.is_leader else ()))
        )
        # Everything that can be wrong with the recipe shows before the directory is made; and only the leading
        # process looks for it and makes it, since the others would find it made.
        path = Path(distributed.leader_only(lambda: str(_checked_path(recipe, run, dataset))))
        if recipe.logging.tensorboard and distributed.is_leader:
            callbacks = [*callbacks, TensorBoard(path / "tensorboard")]
        if recipe.logging.trajectory is not None and distributed.is_leader:
            callbacks = [*callbacks, TrajectoryRecorder(path, recipe.logging.trajectory)]
        steps = run.status.get("total_steps") if run is not None else None
        steps = steps or total_steps(recipe, dataset, distributed, device)
        trainer = Trainer(recipe, dataset, steps, distributed, device)
        distributed.leader_only(lambda: _claim(path, recipe, run, dataset, stack))
        return _fit(Run(path), trainer, CallbackList(callbacks))


def _checked_path(recipe: Recipe, run: Run | None, dataset: Dataset) -> Path:
    """The directory to work in: the run's own, or a new one (never one that already holds a run)."""
    if run is None:
        return _new_path(recipe, dataset)
    if run.data_facts["digest"] != dataset.digest:
        raise RunError(f"The data of '{run.path}' has changed since it was started; it cannot be resumed.")
    return run.path


def _claim(path: Path, recipe: Recipe, run: Run | None, dataset: Dataset, stack: ExitStack) -> None:
    """Lock the directory for as long as `stack` is open, and make it a run where it is new."""
    stack.enter_context(Run(path).locked())
    if run is None:
        Run.create(path, recipe, dataset)


def _fit(run: Run, trainer: Trainer, callback: Callback) -> Run:
    leads = trainer.distributed.is_leader
    try:
        with listening() as interrupt:
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
    """`out`, or a name of its own for every recipe; a run that is already there is never written over."""
    digest = recipe.digest(dataset.digest)
    name = "-".join([Path(dataset.name).name, recipe.model.name, digest[:8]])
    path = Path(recipe.out).expanduser() if recipe.out else Path("runs") / re.sub(r"[^\w.,=-]+", "-", name)
    if (path / "recipe.yaml").is_file():
        status = Run(path).status
        advice = "give another out=" if status["status"] in ("finished", "diverged") else f"--resume {path}"
        raise RunError(f"'{path}' already holds a run ({status['status']}): {advice}.")
    Run(path).refuse_foreign_files()
    return path
