"""The public functions `train` and `resume`. They validate the recipe before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.sources import check_model_name
from vitclinic.data import DataConfig, Dataset
from vitclinic.data.factory import check_source
from vitclinic.tasks import LossConfig, Task
from vitclinic.training.drop_path import LateDropPathConfig
from vitclinic.training.optimizer import OptimizerConfig
from vitclinic.training.overrides import Overrides, build_recipe, default_base
from vitclinic.training.recipe import (
    CheckpointConfig,
    InitConfig,
    LoggingConfig,
    ModelConfig,
    Recipe,
    ValidationConfig,
)
from vitclinic.training.resizing import ResizingConfig
from vitclinic.training.run import Run
from vitclinic.training.schedule import Duration, ScheduleConfig
from vitclinic.treatments import Treatment

NOTHING_TO_TRAIN = (
    "Say what to train on: a recipe, such as shapes (`vitclinic list recipes` shows them), or `data`, such as a folder"
    " of your images with one sub-folder per class."
)


def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    model: str | Mapping[str, Any] | ModelConfig | None = None,
    init: str | Path | Mapping[str, Any] | InitConfig | None = None,
    data: str | Path | Mapping[str, Any] | DataConfig | None = None,
    treatments: Sequence[str | Mapping[str, Any] | Treatment] | None = None,
    task: str | Mapping[str, Any] | Task | None = None,
    loss: str | Mapping[str, Any] | LossConfig | None = None,
    optimizer: str | Mapping[str, Any] | OptimizerConfig | None = None,
    layer_decay: float | None = None,
    head_lr: float | None = None,
    freeze: str | Sequence[str] | None = None,
    schedule: str | Mapping[str, Any] | ScheduleConfig | None = None,
    progressive_resizing: float | Mapping[str, Any] | ResizingConfig | None = None,
    late_drop_path: float | Mapping[str, Any] | LateDropPathConfig | None = None,
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
    parallel: Literal["ddp", "fsdp"] | None = None,
    logging: Mapping[str, Any] | LoggingConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a network with a recipe. Under torchrun, every process calls this.

    Every top-level key of a recipe is a keyword argument; None means "not given" (for no clipping, pass
    `overrides={"clip": None}`). Keywords win over `overrides`, and these over the recipe. docs/train.md lists all keys
    and their defaults.

    Args:
        recipe: Name of a shipped recipe (`vitclinic list recipes`), YAML file, plain data or `Recipe`. By default
            `small`, or the defaults of all keys if a `model`, `init` or `task` is given; at least one key
            must then be given. A `task` alone that has a recipe for the embedded scenes takes that.
        overrides: Changes to it: `{"optimizer.lr": 3e-4}`, nested plain data, or words such as `"optimizer.lr=3e-4"`.
        model: Name of a network, or `{"name": ..., keyword: value}` with keywords for timm.
        init: Weights to start from: a run directory (`RUN@CHECKPOINT`), `timm:NAME`, `torchvision:NAME`, `hf:NAME` or a
            file. Without a `model`, the network is theirs.
        data: A folder with one sub-folder per class, a parquet file, or a name from `vitclinic list datasets`.
        treatments: Names, `{name: {option: value}}` or `Treatment` objects.
        task: A name from `vitclinic list tasks`, or `{"name": ..., option: value}`.
        loss: `"softmax"` or `"sigmoid"`, for the task classification.
        optimizer: `"adamw"`, `"muon"`, `"sgd"`, `"lamb"` or `"rmsprop"`, or `{"name": ..., "lr": ...}`.
        layer_decay: Factor on the learning rate of each block, from the head down.
        head_lr: Peak learning rate of the classifier.
        freeze: Units or blocks of the network that are not trained, or `"backbone"`.
        schedule: `"cosine"`, `"linear"`, `"polynomial"`, `"exponential"` or `"constant"`, or
            `{"name": ..., "warmup": ...}`.
        progressive_resizing: Side of the first training images, as a share of the full one, or
            `{"start": 0.5, "until": "70%"}`; full size unless given.
        late_drop_path: Rate of stochastic depth in the last fifth of the run, or `{"rate": 0.5, "share": 0.2}`.
        epochs: Passes over the training images.
        steps: Optimizer steps, instead of epochs.
        max_time: A time such as `"30m"`, instead of epochs.
        batch_size: Images per step, over all processes.
        accumulate: Number of micro-batches a batch is split into.
        clip: Maximum gradient norm.
        ema: Decay of the averaged weights.
        precision: Number format of forward and backward passes.
        compile: Use `torch.compile`.
        checkpoint: Interval between checkpoints: epochs, `"500 steps"` or `"5%"`.
        validation: Interval between validations.
        test: Score the best checkpoint on the test images at the end.
        seed: Seed of weights, data order and augmentation.
        out: The run directory; `runs/DATA-MODEL-DIGEST` unless given.
        workers: Processes that read images.
        device: `"auto"`, `"cpu"`, `"cuda"` ...
        parallel: Of several processes, each holds a copy of the network (`"ddp"`) or a part of every weight (`"fsdp"`).
        logging: Additional output, such as `{"tensorboard": True}`.
        callbacks: Notified of data reading, steps, epochs, rows of metrics and the end.

    Returns:
        The run: finished, interrupted or diverged.

    Raises:
        VitclinicError: The recipe, the data or the run directory cannot be used; the message says why.

    Example:
        >>> import tempfile
        >>> model = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        >>> out = tempfile.mkdtemp()
        >>> run = train(data="digits", model=model, overrides={"optimizer.lr": 3e-3}, steps=2, out=out)
        >>> run.status["status"], run.results["test"]["count"]
        ('finished', 180)
    """
    given = locals()
    keys: dict[str, Any] = {key: given[key] for key in Recipe.model_fields}  # all of which are keywords
    _check_closed(data)
    if recipe is None and not overrides and all(value is None for value in keys.values()):
        raise RecipeError(NOTHING_TO_TRAIN)
    if recipe is None:
        recipe = default_base(overrides, **keys)
    return _launch(build_recipe(recipe, overrides, **keys), None, callbacks)


def resume(
    path: str | Path,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    workers: int | None = None,
    device: str | None = None,
    parallel: Literal["ddp", "fsdp"] | None = None,
    logging: Mapping[str, Any] | LoggingConfig | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue an interrupted run from its newest intact checkpoint, with the same results as without the interruption.

    Args:
        path: The run directory.
        overrides: Changes to keys that do not affect the numbers, such as `workers`.
        data: The new location of the data, if it has moved; the content must be the same.
        workers: Processes that read images.
        device: `"auto"`, `"cpu"`, `"cuda"` ...
        parallel: Of several processes, each holds a copy of the network (`"ddp"`) or a part of every weight (`"fsdp"`).
        logging: Additional output.
        callbacks: Notified of data reading, steps, epochs, rows of metrics and the end.

    Returns:
        The run: finished, diverged or interrupted again.

    Raises:
        RecipeError: An override would change the numbers.
        RunError: The directory is not a run, the run has ended, or its data has changed.

    Example:
        >>> run = resume("runs/first", workers=4)  # doctest: +SKIP
    """
    run = Run.open(path)
    run.refuse_edited_recipe()
    _check_closed(data)
    source = None if data is None else {"source": data}
    recipe = build_recipe(
        run.recipe, overrides, data=source, workers=workers, device=device, parallel=parallel, logging=logging
    )
    changed = {key for key, value in recipe if value != getattr(run.recipe, key)}
    if recipe.digest("") != run.recipe.digest("") or "out" in changed:
        raise RecipeError(f"A resumed run keeps its recipe: {', '.join(sorted(changed))} cannot change.")
    if run.status["status"] == "finished":
        raise RunError(f"'{path}' is finished; there is nothing to resume.")
    if run.status["status"] == "diverged":
        raise RunError(
            f"'{path}' diverged ({run.status.get('reason', 'the reason is lost')}) and would diverge again; start a new"
            " one with another recipe."
        )
    return _launch(recipe, run, callbacks)


def _check_closed(data: Any) -> None:
    if isinstance(data, Dataset):
        raise RecipeError(
            "data= takes a folder, a file or a name, not an open Dataset, because a resumed run has to open it again."
            " Pass what was given to open_data."
        )


def _launch(recipe: Recipe, run: Run | None, callbacks: Sequence[Callback]) -> Run:
    check_source(recipe.data)
    check_model_name(recipe.model.name)
    from vitclinic.training.launch import launch

    return launch(recipe, run, callbacks)
