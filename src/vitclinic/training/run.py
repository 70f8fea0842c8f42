"""Runs on disk: the directory with recipe, status, metrics and checkpoints.

`metrics.jsonl` has one JSON object per line, in order. Every row has `kind` (train, val, test), `step`, `epoch`,
`loss`, `losses`, `lr` and `grad_norm`. Values that depend on the clock are under `timing` and do not count when runs
are compared. Numbers that are not finite become null, since JSON cannot express them.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitclinic._core.config import validate
from vitclinic._core.errors import RunError, VitclinicError
from vitclinic._core.io import hold_lock, write_errors, write_json, write_text
from vitclinic.data.config import ImageSpec
from vitclinic.data.decoding import Preprocessing, storage_size
from vitclinic.training.recipe import Recipe

if TYPE_CHECKING:
    from vitclinic.data import Dataset
    from vitclinic.training.checkpoint import Checkpoints

log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsFile:
    """The open `metrics.jsonl` of a run, for appending rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Write one row."""
        with write_errors(self.path):
            self._file.write(json.dumps(_replace_nonfinite(row), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush everything to the disk."""
        with write_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Read all complete rows; a last line truncated by a kill is ignored."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut_back(path: Path, step: int) -> None:
    """Drop rows after `step`, and the final test, which will run again."""
    kept = [row for row in read_rows(path) if row["step"] <= step and row["kind"] != "test"]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def drop_timing(rows: list[Row]) -> list[Row]:
    """Return the rows without `timing`: equal runs then have equal rows."""
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


SCHEMA = 1


class Run:
    """A training run on disk: recipe, status, metrics, results and checkpoints.

    `train` and `resume` return one; `Run.open` opens one from an earlier session.

    Attributes:
        path: The run directory.

    Example:
        >>> run = Run.open("runs/demo")  # doctest: +SKIP
        >>> run.status["status"], run.results["test"]["accuracy"]  # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints, for reading weights and states by name."""
        from vitclinic.training.checkpoint import Checkpoints

        return Checkpoints(self.path / "checkpoints")

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open an existing run.

        Args:
            path: The run directory.

        Returns:
            The run; its files are read when asked for.

        Raises:
            RunError: The directory is not a run.
        """
        run = cls(Path(path))
        if not (run.path / "recipe.yaml").is_file():
            raise RunError(f"'{path}' is not a run directory: it has no recipe.yaml.")
        return run

    @classmethod
    def create(cls, path: Path, recipe: Recipe, dataset: Dataset, init: Mapping[str, Any] | None = None) -> Run:
        """Create a run directory; it must be new, empty or left over from an interrupted creation.

        Args:
            path: The directory.
            recipe: The recipe, to be stored with all defaults.
            dataset: The data, of which facts are stored.
            init: What was loaded of the weights that the run starts from, if it does.
        """
        run = cls(path)
        run.refuse_foreign_files()
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        write_json(path / "environment.json", _environment())
        write_json(path / "data.json", _data_facts(dataset))
        if init is not None:
            write_json(path / "init.json", init)
        run.write_status("running", step=0, digest=recipe.digest(dataset.digest))
        # Includes all defaults, so that changing one later does not affect stored runs. Written last: it marks a run.
        write_text(path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        return run

    def refuse_foreign_files(self) -> None:
        """Raise a RunError if the directory contains anything but a run's own files; we never write into those."""
        ours = {".lock", "environment.json", "data.json", "init.json", "status.json"}
        if self.path.is_dir() and any(p.name not in ours and not p.name.endswith(".tmp") for p in self.path.iterdir()):
            raise RunError(f"'{self.path}' is not empty; choose another out=.")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory for this process; in any other process this raises a RunError."""
        with write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        busy = f"Another process is working in '{self.path}'; wait for it or stop it."
        with hold_lock(self.path / ".lock", busy, reentrant=True):
            yield

    def at(self, name: str) -> Checkpoint:
        """Return one of the run's checkpoints, to pass to `examine`.

        Example:
            >>> str(Run(Path("runs/demo")).at("epoch-3"))
            'runs/demo@epoch-3'
        """
        return Checkpoint(self, name)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, with every default resolved."""
        text = (self.path / "recipe.yaml").read_text(encoding="utf-8")
        return validate(Recipe, yaml.safe_load(text) or {})

    @property
    def data_facts(self) -> dict[str, Any]:
        """Facts about the data: name, classes, size, channels, counts and digest."""
        return self._json("data.json")

    @property
    def spec(self) -> ImageSpec:
        """The image shape and number of classes the network was built for."""
        facts = self.data_facts
        height, width = facts["size"]
        return ImageSpec(len(facts["classes"]), facts["channels"], (height, width))

    @property
    def preprocessing(self) -> Preprocessing:
        """The way from an image file to the pixels that the run's val and test splits have."""
        facts = self.data_facts
        height, width = facts["size"]
        if "framed" in facts:
            framed = facts["framed"]
            return Preprocessing((height, width), (framed[0], framed[1]), facts["channels"], facts["whole"])
        from vitclinic.data.dataset import find_preprocessing, open_source  # a run of 0.2: its data can still tell

        try:
            return find_preprocessing(open_source(self.recipe.data), (height, width), facts["channels"])
        except VitclinicError as error:
            log.warning("%s Images are framed as most photographs are.", error)
            return Preprocessing((height, width), storage_size((height, width), math.inf), facts["channels"])

    @property
    def status(self) -> dict[str, Any]:
        """The content of `status.json`: `status`, `step`, `digest`, and for a finished run `results`."""
        return self._json("status.json")

    @property
    def results(self) -> dict[str, Any]:
        """The scores of a finished run, by split: `val` (best checkpoint) and `test`, if the data has them."""
        results: dict[str, Any] = self.status.get("results", {})
        return results

    @property
    def metrics(self) -> list[Row]:
        """The rows of `metrics.jsonl`, in order."""
        return read_rows(self.path / "metrics.jsonl")

    def write_status(self, status: str, **fields: Any) -> None:
        """Rewrite `status.json`; other fields are kept, except the reason and signal of an earlier end."""
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
    """One checkpoint of a run, by name."""

    run: Run
    name: str
    """`last`, `best` or `epoch-N`."""

    def __str__(self) -> str:
        return f"{self.run.path}@{self.name}"


def find_run(text: str) -> tuple[Path, str] | None:
    """Return the run directory and the checkpoint that `DIRECTORY[@CHECKPOINT]` names, if there is such a run."""
    before, _, after = text.rpartition("@")
    for folder, checkpoint in ((text, ""), (before, after)):  # a folder's own name may hold an @
        path = Path(folder).expanduser()
        if folder and (path / "recipe.yaml").is_file():
            return path, checkpoint
    return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _data_facts(dataset: Dataset) -> dict[str, Any]:
    way = dataset.preprocessing
    return {
        "name": dataset.name,
        "classes": list(dataset.classes),
        "size": list(dataset.size),
        "channels": dataset.channels,
        "digest": dataset.digest,
        "counts": {split: len(images) for split, images in sorted(dataset.splits.items())},
        "skipped": dataset.skipped,
        **({} if way is None else {"framed": list(way.framed), "whole": way.whole}),
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
