"""Trackers that rows of metrics are handed on to: TensorBoard, Weights & Biases, MLflow, trackio.

Each is an extra and one key of a recipe's `logging`. A tracker that fails while a run trains is reported once, and the
run goes on without it: `metrics.jsonl` has everything.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitclinic._core.callback import Callback
from vitclinic._core.errors import MissingExtraError, RunError, first_line
from vitclinic._core.io import fingerprint
from vitclinic.training.run import Run

if TYPE_CHECKING:
    from vitclinic.training.recipe import LoggingConfig
    from vitclinic.training.trainer import Trainer

log = logging.getLogger(__name__)


def name_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row as trackers name them.

    Example:
        >>> name_numbers({"kind": "train", "step": 3, "loss": 2.0, "losses": {"nll": 2.0}, "grad_norm": None})
        {'train/loss': 2.0, 'train/losses/nll': 2.0}
    """
    named = {**row, **{f"losses/{name}": value for name, value in row["losses"].items()}}
    found = {name: value for name, value in named.items() if isinstance(value, int | float) and name != "step"}
    return {f"{row['kind']}/{name}": value for name, value in found.items()}


class Sink(Callback):
    """Base of trackers: a callback that opens one, logs each row, and closes it.

    Args:
        folder: The run directory.
        project: What the tracker groups runs by.
    """

    name: ClassVar[str]
    """The key of `logging`, and the extra that installs it."""
    package: ClassVar[str]

    def __init__(self, folder: Path, project: str = "") -> None:
        if find_spec(self.package) is None:
            raise MissingExtraError(f"logging.{self.name}", self.name)
        self.folder, self.project = folder, project
        self.failed = False

    def on_train_start(self, trainer: Trainer) -> None:
        recipe = trainer.recipe.model_dump(mode="json", exclude=set(trainer.recipe.unidentified))
        identity = fingerprint(str(self.folder.absolute()), Run(self.folder).status.get("started"))[:16]
        try:
            with redirect_stdout(sys.stderr):  # some greet there, where a result may be expected
                self.open(trainer.step, identity, recipe)
        except Exception as error:
            raise RunError(f"logging.{self.name} cannot be used: {_reason(error)}.") from error

    def on_row(self, row: Mapping[str, Any]) -> None:
        self._try(lambda: self.log(row["step"], name_numbers(row)))

    def on_train_end(self, status: str) -> None:
        self._try(lambda: self.close(status))

    def _try(self, act: Any) -> None:
        if self.failed:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 (a tracker's server may raise anything)
            self.failed = True
            log.warning("logging.%s has failed (%s); the run goes on without it.", self.name, _reason(error))

    @abstractmethod
    def open(self, step: int, identity: str, recipe: dict[str, Any]) -> None:
        """Begin, or go on after `step` steps, with a run of this identity."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand on the numbers of a row."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End with a status: finished, interrupted or diverged."""


def _reason(error: Exception) -> str:
    return first_line(error)


class TensorBoard(Sink):
    """TensorBoard's events, in `tensorboard/` of the run directory."""

    name = package = "tensorboard"

    def open(self, step: int, identity: str, recipe: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        self.writer.close()


class WeightsAndBiases(Sink):
    """A run of Weights & Biases in `wandb/` of the run directory; offline unless `WANDB_MODE` says otherwise."""

    name = package = "wandb"

    def open(self, step: int, identity: str, recipe: dict[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing is sent
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        options: dict[str, Any] = {"mode": mode, "id": identity, "resume": "allow", "settings": settings}
        options |= {"project": self.project, "name": self.folder.name, "dir": str(self.folder), "config": recipe}
        self.run = wandb.init(**options)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status == "finished" else 1)


class MLflow(Sink):
    """A run of an MLflow experiment, at `MLFLOW_TRACKING_URI`; a resumed run goes on in the same one."""

    name = package = "mlflow"

    def open(self, step: int, identity: str, recipe: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent but to the server named
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        experiment = self.client.get_experiment_by_name(self.project)
        number = self.client.create_experiment(self.project) if experiment is None else experiment.experiment_id
        earlier = self.client.search_runs([number], f"tags.vitclinic = '{identity}'")
        if earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        tags = {"vitclinic": identity}
        self.run = self.client.create_run(number, run_name=self.folder.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:_PARAMETER]) for key, value in _flatten(recipe)]
        for start in range(0, len(params), _AT_ONCE):
            self.client.log_batch(self.run, params=params[start : start + _AT_ONCE])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])

    def close(self, status: str) -> None:
        states = {"finished": "FINISHED", "interrupted": "KILLED"}
        self.client.set_terminated(self.run, states.get(status, "FAILED"))


_PARAMETER, _AT_ONCE = 500, 100
"""Characters of a parameter, and parameters in a call, that every MLflow server takes."""


def _flatten(plain: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in plain.items():
        found += _flatten(value, f"{before}{key}.") if isinstance(value, Mapping) else [(f"{before}{key}", value)]
    return found


class Trackio(Sink):
    """A run of a trackio project, where trackio keeps its own."""

    name = package = "trackio"

    def open(self, step: int, identity: str, recipe: dict[str, Any]) -> None:
        import trackio

        name = f"{self.folder.name}-{identity[:6]}"
        self.run = trackio.init(project=self.project, name=name, config=recipe, resume="allow", embed=False)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, status: str) -> None:
        self.run.finish()


def make_sinks(config: LoggingConfig, folder: Path) -> list[Callback]:
    """Return the trackers that a recipe's `logging` names, for a run directory."""
    named: list[tuple[type[Sink], str | None]] = [
        (WeightsAndBiases, config.wandb),
        (MLflow, config.mlflow),
        (Trackio, config.trackio),
    ]
    found: list[Callback] = [TensorBoard(folder)] if config.tensorboard else []
    return [*found, *(sink(folder, project) for sink, project in named if project is not None)]
