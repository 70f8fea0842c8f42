"""The verbs `train` and `resume`: what they take, as a valid recipe. A mistake in it is told before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.data import DataConfig, Dataset
from vitclinic.data.dataset import check_source
from vitclinic.tasks import LossConfig, Task
from vitclinic.training.optimizer import Duration, OptimizerConfig, ScheduleConfig
from vitclinic.training.overrides import Overrides, build_recipe
from vitclinic.training.recipe import CheckpointConfig, LoggingConfig, ModelConfig, Recipe, ValidationConfig
from vitclinic.training.run import Run
from vitclinic.treatments import Treatment


def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    model: str | Mapping[str, Any] | ModelConfig | None = None,
    data: str | Path | Mapping[str, Any] | DataConfig | None = None,
    treatments: Sequence[str | Mapping[str, Any] | Treatment] | None = None,
    task: str | Mapping[str, Any] | Task | None = None,
    loss: str | Mapping[str, Any] | LossConfig | None = None,
    optimizer: str | Mapping[str, Any] | OptimizerConfig | None = None,
    schedule: str | Mapping[str, Any] | ScheduleConfig | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    max_time: str | float | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    clip: float | None = None,
    ema: float | None = None,
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    compile: bool | None = None,
    checkpoint: Duration | Mapping[str, Any] | CheckpointConfig | None = None,
    validation: Duration | Mapping[str, Any] | ValidationConfig | None = None,
    test: bool | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    device: str | None = None,
    logging: Mapping[str, Any] | LoggingConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a network by a recipe. Under torchrun every process calls this.

    Every key of a recipe is a keyword; one that is None is not given (`overrides={"clip": None}` says "no clipping").
    Keywords win over `overrides`, and these over the recipe. docs/train.md lists all keys and their defaults.

    Args:
        recipe: A shipped recipe's name (`vitclinic list recipes`), a YAML file, plain data or a `Recipe`; the defaults
            unless given.
        overrides: Changes to it: `{"optimizer.lr": 3e-4}`, nested plain data, or words such as `"optimizer.lr=3e-4"`.
        model: A network's name, or `{"name": ..., keyword: value}` with keywords for timm.
        data: A folder with one sub-folder a class, parquet, or a name of `vitclinic list datasets`.
        treatments: Names, `{name: {option: value}}` or `Treatment` objects.
        task: What to learn: a name of `vitclinic list tasks`, or `{"name": ..., option: value}`.
        loss: `"softmax"` or `"sigmoid"`, of the task classification.
        optimizer: `"adamw"`, `"sgd"` or `"lamb"`, or `{"name": ..., "lr": ...}`.
        schedule: `"cosine"`, `"linear"` or `"constant"`, or `{"name": ..., "warmup": ...}`.
        epochs: Passes over the training images.
        steps: Optimizer steps, in place of epochs.
        max_time: A time such as `"30m"`, in place of epochs.
        batch_size: Images a step, over all processes.
        accumulate: Micro-batches that a batch is computed in.
        clip: Largest norm of the gradient.
        ema: Decay of averaged weights.
        precision: Number format of the passes.
        compile: Use `torch.compile`.
        checkpoint: Time between checkpoints: epochs, `"500 steps"` or `"5%"`.
        validation: Time between validations.
        test: Score the best checkpoint on the test images at the end.
        seed: Of weights, order and augmentation.
        out: The run directory; `runs/DATA-MODEL-DIGEST` unless given.
        workers: Processes that read images.
        device: `"auto"`, `"cpu"`, `"cuda"` ...
        logging: What else to write: `{"tensorboard": True}`.
        callbacks: Told of reading, steps, epochs, rows of metrics and the end.

    Returns:
        The finished, interrupted or diverged run.

    Raises:
        VitclinicError: Where recipe, data or directory cannot be used, in one sentence.

    Example:
        >>> import tempfile
        >>> model = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> out = tempfile.mkdtemp()
        >>> run = train(data="digits", model=model, overrides={"optimizer.lr": 3e-3}, steps=2, out=out)
        >>> run.status["status"], run.results["test"]["count"]
        ('finished', 180)
    """
    keys: dict[str, Any] = {
        "model": model,
        "data": _check_closed(data),
        "treatments": treatments,
        "task": task,
        "loss": loss,
        "optimizer": optimizer,
        "schedule": schedule,
        "epochs": epochs,
        "steps": steps,
        "max_time": max_time,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "clip": clip,
        "ema": ema,
        "precision": precision,
        "compile": compile,
        "checkpoint": checkpoint,
        "validation": validation,
        "test": test,
        "seed": seed,
        "out": out,
        "workers": workers,
        "device": device,
        "logging": logging,
    }
    return _launch(build_recipe(recipe, overrides, **keys), None, callbacks)


def resume(
    path: str | Path,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    workers: int | None = None,
    device: str | None = None,
    logging: Mapping[str, Any] | LoggingConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue a run from its newest whole checkpoint, to the same numbers as without the interruption.

    Args:
        path: The run directory.
        overrides: Changes to what does not change the numbers, as keys of the recipe.
        data: Where the same data lies now.
        workers: Processes that read images.
        device: `"auto"`, `"cpu"`, `"cuda"` ...
        logging: What else to write.
        callbacks: Told of reading, steps, epochs, rows of metrics and the end.

    Returns:
        The finished, again interrupted or diverged run.

    Raises:
        RecipeError: Where an override would change the numbers.
        RunError: Where this is no run, it has ended, or its data has changed.

    Example:
        >>> run = resume("runs/first", workers=4)  # doctest: +SKIP
    """
    run = Run.open(path)
    source = None if data is None else {"source": _check_closed(data)}
    recipe = build_recipe(run.recipe, overrides, data=source, workers=workers, device=device, logging=logging)
    changed = {key for key, value in recipe if value != getattr(run.recipe, key)}
    if recipe.digest("") != run.recipe.digest("") or "out" in changed:
        raise RecipeError(f"A resumed run keeps its recipe; {', '.join(sorted(changed))} cannot change.")
    if run.status["status"] == "finished":
        raise RunError(f"'{path}' is finished; there is nothing to resume.")
    if run.status["status"] == "diverged":
        raise RunError(f"'{path}' diverged ({run.status['reason']}); it would again. Change the recipe instead.")
    return _launch(recipe, run, callbacks)


def _check_closed(data: Any) -> Any:
    if isinstance(data, Dataset):
        raise RecipeError(
            "data= takes a folder, a file or a name, not an open Dataset: a resumed run opens its data again. Pass"
            " what was given to open_data."
        )
    return data


def _launch(recipe: Recipe, run: Run | None, callbacks: Sequence[Callback]) -> Run:
    check_source(recipe.data)
    from vitclinic.training.launch import launch

    return launch(recipe, run, callbacks)
