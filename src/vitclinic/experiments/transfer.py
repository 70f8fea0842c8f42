"""Transfer of pretrained weights to other data, by the protocol of [chen2022] App. D.

The learning rate is chosen among a few on a sub-split of the training images; then the whole training set is trained on
with it, and the test images are read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.io import write_json
from vitclinic.experiments.runner import Outcome, Pool, drop_weights, run_all
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.overrides import Overrides, overlay

LRS = (0.001, 0.003, 0.01, 0.03)
"""The learning rates of [chen2022] Table 10."""
PROTOCOL: Mapping[str, Any] = {
    "optimizer": {"name": "sgd", "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup": "20%"},
    "steps": 500,
    "batch_size": 512,
    "clip": 1.0,
    "validation": "100%",
    "checkpoint": "20%",
}
"""Fine-tuning on Flowers and Pets as in [chen2022] App. D: SGD with momentum 0.9, 500 steps with 100 of warm-up."""


@dataclass(frozen=True)
class Transfer:
    """The result of `transfer`.

    Attributes:
        init: The weights.
        metric: What selected the learning rate: a metric of the task.
        trials: The metric on the sub-split by learning rate; None where a run diverged.
        lr: The learning rate that was chosen.
        test: The scores of the network that was trained on the whole training set.
        path: Its run directory.
    """

    init: str
    metric: str
    trials: dict[float, float | None]
    lr: float
    test: dict[str, Any]
    path: Path

    @property
    def run(self) -> Run:
        """The run on the whole training set."""
        return Run.open(self.path)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        trials = [{"lr": lr, self.metric: value} for lr, value in self.trials.items()]
        return {"init": self.init, "trials": trials, "lr": self.lr, "test": self.test, "path": str(self.path)}


def transfer(
    init: str | Path,
    data: str | Path,
    overrides: Overrides | None = None,
    *,
    lrs: Sequence[float] = LRS,
    held_out: float = 0.1,
    out: str | Path = "transfer",
    processes: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Transfer:
    """Fine-tune weights on other data: the learning rate on a sub-split, then the whole training set [chen2022 App. D].

    Everything is kept in `out`, and the same call goes on after an interruption. Images are of the size that the
    weights were made for, unless `model.img_size` says otherwise.

    Args:
        init: The weights, as `init` of a recipe.
        data: The data, as for `train`.
        overrides: Changes to the recipe of all runs, such as `{"steps": 10000, "schedule.warmup": "500 steps"}`.
        lrs: The learning rates to choose among.
        held_out: Share of the training images that the learning rate is chosen on, if the data has no val split.
        out: Folder for runs and the result, `transfer.json`.
        processes: How many runs to train at a time.
        callbacks: Told of runs done.

    Returns:
        The scores of all learning rates on the sub-split, and those of the final network on test.

    Raises:
        RecipeError: The recipe is wrong, or the data has no test images.
        RunError: A run failed, or all diverged.

    Example:
        >>> found = transfer("runs/pretrained", "flowers/", {"steps": 100})  # doctest: +SKIP
        >>> found.lr, found.test["accuracy"]  # doctest: +SKIP
    """
    trials, final = plan_transfer(init, data, overrides, lrs=lrs, held_out=held_out)
    folder = Path(out)
    pool = Pool(folder / "runs")
    outcomes = run_all(trials, pool, processes=processes, callbacks=callbacks)
    metric = final.task.selects
    scores = {recipe.optimizer.lr: _score(outcome, metric) for recipe, outcome in zip(trials, outcomes, strict=True)}
    finished = {lr: score for lr, score in scores.items() if score is not None}
    if not finished:
        raise RunError(f"All {len(trials)} learning rates diverged; give smaller ones.")
    best = max(finished, key=lambda lr: finished[lr] if final.task.higher_is_better else -finished[lr])
    chosen = build_recipe(final, {"optimizer.lr": best})
    [outcome] = run_all([chosen], pool, callbacks=callbacks)
    if _score(outcome, metric, "test") is None:
        raise RunError(f"The run on the whole training set diverged at the learning rate {best:g} that was chosen.")
    for trial in outcomes:
        drop_weights(trial.run)
    found = Transfer(str(init), metric, scores, best, outcome.run.results["test"], outcome.run.path)
    write_json(folder / "transfer.json", found.plain())
    return found


def plan_transfer(
    init: str | Path, data: str | Path, overrides: Overrides | None = None, *, lrs: Sequence[float], held_out: float
) -> tuple[list[Recipe], Recipe]:
    """Return the recipes on the sub-split, one for each learning rate, and the one on the whole training set."""
    if not lrs or len(set(lrs)) < len(lrs) or min(lrs) <= 0:
        raise RecipeError("Give learning rates above 0, each once.")
    if not 0 < held_out < 0.5:
        raise RecipeError(f"'held_out' is a share of the training images, above 0 and below 0.5 (got {held_out}).")
    source = {"init": str(init), "data": {"source": str(data), "held_out": held_out}}
    base = build_recipe(overlay(PROTOCOL, source), overrides)
    for key in ("out", "test"):
        if key in base.model_fields_set:
            raise RecipeError(f"'{key}' is not for transfer, which names its runs and scores the last one on test.")
    if base.model.img_size is None and (size := _native_size(base)) is not None:
        base = build_recipe(base, {"model.img_size": size})
    trials = [build_recipe(base, {"optimizer.lr": float(lr), "test": False}) for lr in lrs]
    return trials, build_recipe(base, {"data.train_on_val": True})


def _native_size(recipe: Recipe) -> int | list[int] | None:
    """Return the size of the images that the weights were made for."""
    from vitclinic.training.init import read_initial_weights

    found = read_initial_weights(recipe)
    size = None if found is None else found.size
    return None if size is None else size[0] if size[0] == size[1] else list(size)


def _score(outcome: Outcome, metric: str, split: str = "val") -> float | None:
    """Return the score of a run; None if it diverged."""
    if outcome.status == "failed":
        raise RunError(f"A run failed: {outcome.reason}")
    if outcome.status == "diverged":
        return None
    results = outcome.run.results
    if split not in results:
        raise RecipeError(
            f"The data has no {split} images, which transfer needs; it has {', '.join(results) or 'none'}."
        )
    return float(results[split][metric])
