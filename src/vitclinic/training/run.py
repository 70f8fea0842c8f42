"""Runs on disk: the directory with recipe, status, metrics and checkpoints."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitclinic._core.config import validate
from vitclinic._core.environment import read_count
from vitclinic._core.errors import DamagedFileError, RecipeError, RunError, VitclinicError, did_you_mean
from vitclinic._core.io import (
    find_path,
    fingerprint,
    read_record,
    read_text,
    read_yaml,
    write_errors,
    write_json,
    write_text,
)
from vitclinic._core.lock import hold_lock
from vitclinic.data.config import ImageSpec
from vitclinic.data.decoding import Preprocessing, storage_size
from vitclinic.data.text import TextSpec
from vitclinic.training.recipe import Recipe
from vitclinic.training.rows import Row, read_rows
from vitclinic.training.stored import are_results, read_data_facts

if TYPE_CHECKING:
    from vitclinic.data import Dataset
    from vitclinic.training.checkpoint import Checkpoints

log = logging.getLogger(__name__)

SCHEMA = 1
_STATUS = {"status": str, "step": int}


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
        found = find_path(str(Path(path) / "recipe.yaml"), RunError, "a run")
        if found is None or not found.is_file():
            raise no_run(str(path))
        return cls(found.parent)

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
        # Includes all defaults, so that changing one later does not affect stored runs. Written last: it marks a run.
        plain = recipe.model_dump(mode="json")
        run.write_status("running", step=0, digest=recipe.digest(dataset.digest), recipe_digest=_digest(plain))
        write_text(path / "recipe.yaml", yaml.safe_dump(plain, sort_keys=False))
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
        try:
            return validate(Recipe, self._plain_recipe())
        except RecipeError as error:
            raise DamagedFileError(f"'{self.path / 'recipe.yaml'}' is damaged or was edited: {error}") from error

    def _plain_recipe(self) -> dict[str, Any]:
        file = self.path / "recipe.yaml"
        try:
            plain = read_yaml(read_text(file, DamagedFileError))
        except yaml.YAMLError as error:
            raise DamagedFileError(f"'{file}' is damaged ({' '.join(str(error).split())}).") from error
        if not isinstance(plain, dict) or not {"model", "data"} <= plain.keys():  # all keys are stored
            raise DamagedFileError(f"'{file}' is damaged (it holds no whole recipe).")
        return plain

    @property
    def signatures(self) -> dict[str, str]:
        """Digests of the files that say what the network is, and how images come to it."""
        return {"recipe.yaml": _digest(self._plain_recipe()), "data.json": fingerprint(self.data_facts)}

    def refuse_changed_files(self, checkpoint: str) -> None:
        """Raise a RunError if `recipe.yaml` or `data.json` are not those that a checkpoint was made with.

        What does not change the numbers (`out`, `workers`, `device`, `logging`, where the data lies) may differ.
        """
        made_with, now = self.checkpoints.made_with(checkpoint), self.signatures
        changed = [file for file, digest in now.items() if made_with.get(file, digest) != digest]
        if changed:
            raise RunError(
                f"'{self.path / changed[0]}' was edited after the run started, and no longer says what its weights"
                " are: undo the edit, or restore the file from a copy."
            )

    def refuse_edited_recipe(self) -> None:
        """Raise a RunError if `recipe.yaml` is not the one that `status.json` says the run was started with.

        It is quick; the checkpoints know it, too, and `refuse_changed_files` asks them.
        """
        status = self.status
        stored, found = status.get("recipe_digest"), _digest(self._plain_recipe())
        if stored is None:  # a run of version 0.2 or earlier
            stored, found = status.get("digest"), self.recipe.digest(self.data_facts["digest"])
        if stored not in (None, found):
            raise RunError(
                f"'{self.path / 'recipe.yaml'}' was edited after the run started, and a resumed run keeps its recipe:"
                " undo the edit, or train the new recipe with another `out`."
            )

    @property
    def data_facts(self) -> dict[str, Any]:
        """Facts about the data: name, classes, size, channels, counts and digest."""
        return read_data_facts(self.path / "data.json")

    @property
    def threads(self) -> int | None:
        """The number of torch's threads when the run began; None if that is not known."""
        try:
            found = read_record(self.path / "environment.json", {}, "train again").get("threads")
        except DamagedFileError:  # it is not needed
            return None
        return found if isinstance(found, int) and found > 0 else None

    @property
    def spec(self) -> ImageSpec:
        """The image shape and number of classes the network was built for."""
        facts = self.data_facts
        height, width = facts["size"]
        text = facts.get("text")
        spec = None if text is None else TextSpec(tuple(text["tokens"]), text["length"])
        return ImageSpec(len(facts["classes"]), facts["channels"], (height, width), spec)

    @property
    def preprocessing(self) -> Preprocessing:
        """The way from an image file to the pixels that the run's val and test splits have."""
        facts = self.data_facts
        height, width = facts["size"]
        if "framed" in facts:
            framed = facts["framed"]
            return Preprocessing((height, width), (framed[0], framed[1]), facts["channels"], facts["whole"])
        from vitclinic.data.dataset import find_preprocessing  # a run of 0.2: its data can still tell
        from vitclinic.data.factory import open_source

        try:
            return find_preprocessing(open_source(self.recipe.data), (height, width), facts["channels"])
        except VitclinicError as error:
            log.warning("%s Images are framed as most photographs are.", error)
            return Preprocessing((height, width), storage_size((height, width), math.inf), facts["channels"])

    @property
    def status(self) -> dict[str, Any]:
        """The content of `status.json`: `status`, `step`, `digest`, and for a finished run `results`.

        If the file is lost or damaged, the run counts as interrupted at its last checkpoint, and can be resumed.
        """
        try:
            status = read_record(self.path / "status.json", _STATUS, "the run counts as interrupted")
            total = status.get("total_steps", 1)
            if not isinstance(total, int) or isinstance(total, bool) or total < 1:
                raise DamagedFileError(f"'{self.path / 'status.json'}' is damaged ('total_steps' is wrong).")
            return status
        except DamagedFileError as error:
            log.warning("%s", error)
        try:
            step = int(self.checkpoints.read("last")[1]["step"])
        except RunError:
            step = 0
        return {"schema": SCHEMA, "status": "interrupted", "step": step, "reason": "status.json was damaged"}

    @property
    def results(self) -> dict[str, Any]:
        """The scores of a finished run, by split: `val` (best checkpoint) and `test`, if the data has them.

        Damaged ones are none, with a warning.
        """
        results: dict[str, Any] = self.status.get("results", {})
        if not results:
            return {}
        if not are_results(results, _find_score_names(self.recipe)):
            log.warning(
                "'%s' is damaged ('results' are wrong); examine the run to score it.", self.path / "status.json"
            )
            return {}
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
        found = find_path(str(Path(folder) / "recipe.yaml"), RecipeError, "a run") if folder else None
        if found is not None and found.is_file():
            return found.parent, checkpoint
    return None


def no_run(text: str) -> RunError:
    """Return the error for a text that names no run."""
    why = "it has no recipe.yaml" if Path(text).is_dir() else "there is no such folder"
    return RunError(f"'{text}' is not a run directory: {why}.{suggest_run(text)}")


def suggest_run(text: str) -> str:
    """Return ` Did you mean 'runs/photos'?` for a run beside, or at, a path where there is none; else nothing."""
    folder = Path(text.partition("@")[0]).expanduser()
    try:
        beside = [path.parent for path in (*folder.parent.glob("*/recipe.yaml"), *folder.glob("*/recipe.yaml"))]
        beside += [path.parent for path in Path("runs").glob("*/recipe.yaml")]
    except OSError:  # the suggestion is not worth another error
        return ""
    return did_you_mean(str(folder), map(str, beside))


def _find_score_names(recipe: Recipe) -> list[str]:
    """Return the names of the numbers that are shown of a score."""
    from vitclinic.tasks.task import headlines

    shown = headlines(recipe.task)
    ends = [f"{metric.name}_{end}" for metric in shown if metric.interval for end in ("low", "high")]
    return [*(metric.name for metric in shown), *ends]


def _digest(plain: dict[str, Any]) -> str:
    """Return the digest of a stored recipe as it is written, without the keys that change no number."""
    kept = {key: value for key, value in plain.items() if key not in Recipe.unidentified}
    data = kept.get("data")
    if isinstance(data, dict):
        kept["data"] = {key: value for key, value in data.items() if key != "source"}
    return fingerprint(kept)


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
        **({} if dataset.text is None else {"text": asdict(dataset.text)}),
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
        "processes": read_count("WORLD_SIZE"),
    }
