"""Read-only observers of a training run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from vitclinic.errors import MissingExtraError
from vitclinic.training.metrics import Row

if TYPE_CHECKING:
    from vitclinic.training.loop import Trainer


class Observer:
    """Override what you need. Observers may look at the trainer and must not change it."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step (of this process: a resumed run starts again)."""

    def on_row(self, row: Row) -> None:
        """A row was added to the metrics: training, validation or test."""

    def on_step(self, trainer: Trainer) -> None:
        """A step is done."""

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        """`epoch` epochs are done (0: before the first step)."""

    def on_end(self, status: str) -> None:
        """The run has ended, one way or the other."""


class TensorBoard(Observer):
    """Writes every number of every row as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError("logging.tensorboard", "tensorboard")
        self.folder = folder

    def on_start(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=trainer.step + 1)

    def on_row(self, row: Row) -> None:
        named = {**row, **{f"loss/{name}": value for name, value in row["losses"].items()}}
        for name, value in named.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def on_end(self, status: str) -> None:
        self.writer.close()
