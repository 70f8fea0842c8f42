"""`metrics.jsonl`: one JSON object a line, in the order things happened.

Every row has `kind` (train, val, test), `step`, `epoch`, `loss`, `losses`, `lr` and `grad_norm`. What depends
on the clock is under `timing` and is no part of a run's identity. A number that is not finite is null, for JSON
has no other word for it.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitclinic._core.config import validate
from vitclinic._core.errors import RunError
from vitclinic._core.io import write_errors, write_json, write_text
from vitclinic._core.lock import hold_lock
from vitclinic.data.spec import ImageSpec
from vitclinic.training.recipe import Recipe

if TYPE_CHECKING:
    from vitclinic.data import Dataset
    from vitclinic.training.checkpoint import Checkpoints

Row = dict[str, Any]


class MetricsFile:
    """Appends rows; on resume, cuts back to a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        with write_errors(self.path):
            self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; a last line that was cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut_back(path: Path, step: int) -> None:
    """Forget what was recorded after `step`, and the final test, which will be made again."""
    kept = [row for row in read_rows(path) if row["step"] <= step and row["kind"] != "test"]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def drop_timing(rows: list[Row]) -> list[Row]:
    """Return the rows without what depends on the clock: equal for equal runs."""
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


SCHEMA = 1


class Run:
    """A training run on disk.

    Example:
        >>> run = Run.open("runs/demo")  # doctest: +SKIP
        >>> run.status["status"], run.results["test"]["accuracy"]  # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        from vitclinic.training.checkpoint import Checkpoints

        return Checkpoints(self.path / "checkpoints")

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open an existing run.

        Raises:
            RunError: Where there is none.
        """
        run = cls(Path(path))
        if not (run.path / "recipe.yaml").is_file():
            raise RunError(f"'{path}' is not a run directory: it has no recipe.yaml.")
        return run

    @classmethod
    def create(cls, path: Path, recipe: Recipe, dataset: Dataset) -> Run:
        """Create a run; the directory must be new or empty, or one whose making was cut off."""
        run = cls(path)
        run.refuse_foreign_files()
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        write_json(path / "environment.json", _environment())
        write_json(path / "data.json", _data_facts(dataset))
        run.write_status("running", step=0, digest=recipe.digest(dataset.digest))
        # With all defaults, so that a later change of one changes no stored run; and last: it makes this a run.
        write_text(path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        return run

    def refuse_foreign_files(self) -> None:
        """Raise a RunError where the directory has files that are not a run's own: it is never written to."""
        ours = {".lock", "environment.json", "data.json", "status.json"}
        if self.path.is_dir() and any(p.name not in ours and not p.name.endswith(".tmp") for p in self.path.iterdir()):
            raise RunError(f"'{self.path}' is not empty; choose another out=.")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; a second one gets a sentence instead."""
        with write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        busy = f"Another process is working in '{self.path}'; wait for it or stop it."
        with hold_lock(self.path / ".lock", busy, reentrant=True):
            yield

    def at(self, name: str) -> Checkpoint:
        """Return one of the run's checkpoints, as `examine` takes it.

        Example:
            >>> str(Run(Path("runs/demo")).at("epoch-3"))
            'runs/demo@epoch-3'
        """
        return Checkpoint(self, name)

    @property
    def recipe(self) -> Recipe:
        text = (self.path / "recipe.yaml").read_text(encoding="utf-8")
        return validate(Recipe, yaml.safe_load(text) or {})

    @property
    def data_facts(self) -> dict[str, Any]:
        """What the run's network needs to know of its data: classes, size, channels; and the data's digest."""
        return self._json("data.json")

    @property
    def spec(self) -> ImageSpec:
        """The images and classes that the run's network was made for."""
        facts = self.data_facts
        height, width = facts["size"]
        return ImageSpec(len(facts["classes"]), facts["channels"], (height, width))

    @property
    def status(self) -> dict[str, Any]:
        return self._json("status.json")

    @property
    def results(self) -> dict[str, Any]:
        """The scores of a finished run: `val` (best checkpoint) and `test`, where the data has them."""
        results: dict[str, Any] = self.status.get("results", {})
        return results

    @property
    def metrics(self) -> list[Row]:
        return read_rows(self.path / "metrics.jsonl")

    def write_status(self, status: str, **fields: Any) -> None:
        """Replace `status.json`, keeping fields that are not given anew, but for what an earlier end left."""
        path = self.path / "status.json"
        before = self.status if path.exists() else {"schema": SCHEMA, "started": _now()}
        before = {key: value for key, value in before.items() if key not in ("reason", "signal")}
        write_json(path, {**before, "status": status, "updated": _now(), "process": os.getpid(), **fields})

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"'{self.path / name}' cannot be read: {error}") from error
        return value


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a run at one time."""

    run: Run
    name: str
    """`last`, `best` or `epoch-N`."""

    def __str__(self) -> str:
        return f"{self.run.path}@{self.name}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _data_facts(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "classes": list(dataset.classes),
        "size": list(dataset.size),
        "channels": dataset.channels,
        "digest": dataset.digest,
        "counts": {split: len(images) for split, images in sorted(dataset.splits.items())},
        "skipped": dataset.skipped,
    }


def _environment() -> dict[str, Any]:
    import torch

    packages = ("vitclinic", "torch", "torchvision", "timm", "numpy", "pillow")
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
