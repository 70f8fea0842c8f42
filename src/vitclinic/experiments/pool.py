"""A pool of runs: a recipe is trained once per digest, whoever asks for it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from vitclinic._core.callback import Callback
from vitclinic.data import open_data
from vitclinic.training import Recipe, Run, resume, train

ENDED = ("finished", "diverged")
"""Statuses in which the same recipe would end again: a divergence is a result like any other."""


def drop_weights(run: Run) -> None:
    """Remove the checkpoints of an ended run, which fill a disk where there are many short trials."""
    shutil.rmtree(run.checkpoints.folder, ignore_errors=True)


class Pool:
    """A folder with one run directory for each recipe's digest; studies and benchmarks may share it.

    Example:
        >>> pool = Pool("runs/pool")
        >>> run = pool.train(build_recipe("shapes", ["seed=1"]))  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._data_digests: dict[tuple[object, ...], str] = {}

    def path(self, recipe: Recipe) -> Path:
        """Return where the run of a recipe is, or will be."""
        return self.folder / recipe.digest(self._data_digest(recipe))[:16]

    def find(self, recipe: Recipe) -> Run | None:
        """Return the run of a recipe if it is there and has ended."""
        path = self.path(recipe)
        if not (path / "recipe.yaml").is_file():
            return None
        run = Run.open(path)
        return run if run.status["status"] in ENDED else None

    def train(self, recipe: Recipe, callbacks: Sequence[Callback] = ()) -> Run:
        """Return the ended run of a recipe: found, resumed if it was interrupted or failed, or trained.

        Raises:
            KeyboardInterrupt: A signal stopped the training, which is saved.
            LockedError: Another process is training it.
        """
        found = self.find(recipe)
        if found is not None:
            return found
        path = self.path(recipe)
        with Run(path).lock():  # before another look: until then, another process may have trained it
            return self.find(recipe) or self._train(recipe, path, callbacks)

    def _train(self, recipe: Recipe, path: Path, callbacks: Sequence[Callback]) -> Run:
        if (path / "recipe.yaml").is_file():
            # Where the same data lies by now, and what changes no number, is the asking recipe's to say.
            run = resume(path, {"data.source": recipe.data.source}, device=recipe.device, callbacks=callbacks)
        else:
            run = train(recipe.model_copy(update={"out": str(path)}), callbacks=callbacks)
        if run.status["status"] not in ENDED:
            raise KeyboardInterrupt(f"'{path}' was interrupted; it continues when it is asked for again")
        return run

    def _data_digest(self, recipe: Recipe) -> str:
        """Return the digest of a recipe's data, which is opened once however many recipes share it."""
        key = (recipe.data.model_dump_json(), recipe.image_size, recipe.model.in_chans)
        if key not in self._data_digests:
            data = open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans)
            self._data_digests[key] = data.digest
        return self._data_digests[key]
