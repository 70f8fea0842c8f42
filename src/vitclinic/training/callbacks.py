"""Callbacks behind a recipe's `logging` keys: training images and the trajectory of the weights."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.callback import Callback
from vitclinic._core.errors import DamagedFileError, RecipeError
from vitclinic._core.images import png, tile
from vitclinic._core.io import DAMAGED_ARRAYS, write_bytes
from vitclinic.data.randomness import generator

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer


class SampleRecorder(Callback):
    """A callback that keeps a picture of training images as the network sees them, `samples.png`.

    It is drawn at the first step and after each epoch, at most every ten seconds.
    """

    every = 10.0

    def __init__(self, folder: Path) -> None:
        self.file = folder / "samples.png"
        self.due, self.drawn = True, -math.inf

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        self.due = True

    def on_step(self, trainer: Trainer) -> None:
        if trainer.samples is None or not self.due or time.monotonic() < self.drawn + self.every:
            return
        self.due, self.drawn = False, time.monotonic()
        pixels = trainer.samples.float().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)
        write_bytes(self.file, png(tile(pixels.cpu().numpy())))


FILE = "trajectory.npz"

_WEIGHTS = 2**20
"""Number of weights projected at a time."""


def projection(parameters: Iterable[tuple[str, Tensor]], size: int, seed: int) -> NDArray[np.float64]:
    """Project all weights w to a vector S w of length `size`, independent of the order of the parameters.

    S is a count sketch: every weight is added, with a random sign, to one random entry, so |S w| is close to |w|.

    Args:
        parameters: Pairs of name and parameter; the name seeds the columns of S.
        size: Length of the projection.
        seed: The run's seed.

    Returns:
        The projection [size] in float64.

    Example:
        >>> import torch
        >>> w = torch.ones(10_000)
        >>> y = projection([("weight", w)], 2000, seed=0)
        >>> bool(abs(np.linalg.norm(y) / 100 - 1) < 0.05)
        True
    """
    total = np.zeros(size)
    for name, parameter in parameters:
        columns = generator("trajectory", seed, name)
        flat = parameter.detach().reshape(-1)
        for start in range(0, len(flat), _WEIGHTS):
            weights = flat[start : start + _WEIGHTS].double().cpu().numpy()
            row, sign = np.divmod(columns.integers(0, 2 * size, len(weights)), 2)
            total += np.bincount(row, (2 * sign - 1) * weights, minlength=size)
    return total


class TrajectoryRecorder(Callback):
    """A callback that keeps random projections of the weights in `trajectory.npz`: at the start, every epoch, the end.

    The weights are those a checkpoint holds (with `ema`, the averaged ones). A resumed run appends to the same file.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.file = folder / FILE
        self.size = size
        self.rows = read_projections(folder)
        found = next((len(row) for _, row in self.rows.values()), size)
        if found != size:
            raise RecipeError(f"logging.trajectory is {size}, but '{self.file}' has projections of size {found}.")

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop rows from after the checkpoint we resume from: those steps are about to run again."""
        self.rows = {step: row for step, row in self.rows.items() if step <= trainer.step}

    def on_epoch(self, trainer: Trainer, epoch: int) -> None:
        self._keep(trainer)

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == trainer.total_steps:  # the end need not be that of an epoch
            self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        if trainer.step in self.rows:
            return
        row = projection(trainer.evaluation_network.named_parameters(), self.size, trainer.recipe.seed)
        self.rows[trainer.step] = (trainer.step / trainer.steps_per_epoch, row)
        buffer = io.BytesIO()
        epochs, rows = zip(*self.rows.values(), strict=True)
        np.savez(buffer, step=np.array(list(self.rows)), epoch=np.array(epochs), projection=np.stack(rows))
        write_bytes(self.file, buffer.getvalue())


def read_projections(folder: Path) -> dict[int, tuple[float, NDArray[np.float64]]]:
    """Read epoch and projection [k] by step, in order; empty if the run recorded none."""
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        with np.load(file, allow_pickle=False) as stored:
            steps, epochs, rows = stored["step"], stored["epoch"], stored["projection"]
        if rows.ndim != 2 or rows.dtype.kind != "f":
            raise ValueError("it holds no projections")
        return {int(step): (float(epoch), row) for step, epoch, row in zip(steps, epochs, rows, strict=True)}
    except DAMAGED_ARRAYS as error:
        raise DamagedFileError(f"'{file}' cannot be read ({error}); delete it to go on without it.") from error
