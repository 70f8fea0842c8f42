"""Runs under a folder as plain data, read while they are being written, damaged ones too.

Readers know a run by an id that is made from its path: nothing that they send is ever opened. Links are not followed,
so that nothing outside of the folder is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vitclinic._core.errors import DamagedFileError
from vitclinic._core.io import read_record, read_text, read_yaml
from vitclinic.experiments.watch.curves import Curves, is_number, is_score
from vitclinic.training.recipe import Recipe
from vitclinic.training.rows import Row, parse_row

DEPTH = 4
"""Levels of folders below the watched one in which runs are looked for."""
MOST_RUNS = 2000
_FOLLOWED = 24
"""Runs whose curves are kept in memory, those that were asked for last."""
_TAIL = 2**16
"""Bytes at the end of metrics.jsonl that tell how far a run is."""
_SECONDS = 1.0
"""Time for recipes that were not read before, at each look at the table."""
_LARGEST_PICTURE = 2**22
_PNG = b"\x89PNG\r\n\x1a\n"


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run directories at or below a folder, without following links, none inside another."""
    level = [root]
    for _ in range(DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            if stamp(folder / "recipe.yaml") is not None:
                yield folder
                continue
            try:
                with os.scandir(folder) as entries:
                    deeper += sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
            except OSError:  # it has just been removed, or is not ours to read
                continue
        level = deeper


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does (inode, size, time); None if it is no regular file or a link."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


@dataclass
class WatchedRun:
    """A run directory with what was read of it, read again when its files change."""

    path: Path
    name: str
    """Its path below the watched folder."""
    keys: dict[str, Any] = field(default_factory=dict)
    """The recipe, flat."""
    problem: str = ""
    _seen: dict[str, tuple[int, int, int] | None] = field(default_factory=dict)
    _status: dict[str, Any] = field(default_factory=dict)
    _tail: list[Row] = field(default_factory=list)

    def has_changed(self, file: str) -> bool:
        """Return True if a file is not the one that was asked about last."""
        now = stamp(self.path / file)
        if file in self._seen and self._seen[file] == now:
            return False
        self._seen[file] = now
        return True

    def read_recipe(self) -> None:
        """Read the keys of the recipe; what is wrong with it is `problem`."""
        self.keys, self.problem = {}, ""
        try:
            plain = read_yaml(read_text(self.path / "recipe.yaml", DamagedFileError))
        except (DamagedFileError, yaml.YAMLError) as error:
            self.problem = f"recipe.yaml cannot be read: {' '.join(str(error).split())}"
            return
        if not isinstance(plain, dict):
            self.problem = "recipe.yaml holds no recipe."
            return
        self.keys = {key: value for key, value in flatten(plain) if key.split(".")[0] not in Recipe.unidentified}

    def view(self) -> dict[str, Any]:
        """Return the run as a row of the table."""
        if self.has_changed("status.json"):
            self._status = self._read_status()
        if self.has_changed("metrics.jsonl"):
            self._tail = read_tail(self.path / "metrics.jsonl") if self._seen["metrics.jsonl"] else []
        status = self._status
        train = [row for row in self._tail if row["kind"] == "train"]
        step = max([_whole(status.get("step")), *(row["step"] for row in self._tail)])
        total = _whole(status.get("total_steps"))
        running = status.get("status") == "running"
        written = self._seen["metrics.jsonl"] or self._seen["status.json"]
        pace = seconds_per_step(self._tail, self.keys.get("batch_size"))
        return {
            "name": self.name,
            "status": str(status.get("status", "unknown")),
            "reason": str(status.get("reason") or status.get("failure") or self.problem),
            "started": str(status.get("started", "")),
            "step": step,
            "total_steps": total,
            "epoch": next((row["epoch"] for row in reversed(self._tail) if is_number(row.get("epoch"))), None),
            "seconds_left": (total - step) * pace if running and pace is not None and total >= step else None,
            "silent": max(0.0, time.time() - written[2] / 1e9) if running and written else None,
            "images_per_second": _speed(train[-1]) if train else None,
            "scores": self._scores(),
            "version": 0 if self._seen["metrics.jsonl"] is None else self._seen["metrics.jsonl"][1],
            "samples": (stamp(self.path / "samples.png") or (0, 0, 0))[2],
            "keys": self.keys,
        }

    def _read_status(self) -> dict[str, Any]:
        if self._seen["status.json"] is None:
            return {"reason": "status.json is missing"}
        try:
            return read_record(self.path / "status.json", {"status": str}, "the run counts as interrupted")
        except DamagedFileError:
            return {"reason": "status.json is damaged"}

    def _scores(self) -> dict[str, float]:
        """Return the results of a finished run, or the last scores of another."""
        results = self._status.get("results")
        if not isinstance(results, dict):
            results = {row["kind"]: row for row in self._tail}
        found = {}
        for split, score in results.items():
            for name, value in score.items() if isinstance(score, dict) else ():
                if is_score(name, value) and (split != "train" or name == "loss"):
                    found[f"{split} {name}"] = value
        return found


def flatten(plain: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a nested mapping with dots, and values as a cell of a table shows them.

    Example:
        >>> dict(flatten({"model": {"name": "vit"}, "treatments": ["sam"], "ema": None}))
        {'model.name': 'vit', 'treatments': 'sam', 'ema': None}
    """
    for key, value in plain.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif value is None or isinstance(value, bool | str) or is_number(value):
            yield name, value
        else:
            items = value if isinstance(value, list) else [value]
            shown = [item if isinstance(item, str) else json.dumps(item, default=str) for item in items]
            yield name, ", ".join(shown) or "none"


def read_tail(path: Path) -> list[Row]:
    """Return the last rows of a metrics file, without the line that is being written."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except OSError:
        return []
    return [row for line in lines if (row := parse_row(line)) is not None]


def seconds_per_step(rows: list[Row], batch_size: Any) -> float | None:
    """Return how long a step takes, with its share of validations; None if rows do not tell."""
    train = [row for row in rows if row["kind"] == "train" and (_speed(row) or 0) > 0]
    if not train or not is_number(batch_size):
        return None
    step = sum(batch_size / row["timing"]["images_per_second"] for row in train) / len(train)
    spanned = train[-1]["step"] - train[0]["step"]
    scored = [row["count"] / speed for row in rows if (speed := _speed(row)) and is_number(row.get("count"))]
    return float(step + (sum(scored) / spanned if spanned > 0 else 0.0))


def _speed(row: Row) -> float | None:
    timing = row.get("timing")
    speed = timing.get("images_per_second") if isinstance(timing, dict) else None
    return float(speed) if speed is not None and is_number(speed) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class WatchedFolder:
    """All runs at or below a folder; may be asked by several threads.

    Args:
        root: The folder. It need not be there yet.

    Example:
        >>> WatchedFolder(Path("no/such/folder")).table()["runs"]
        []
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, WatchedRun] = {}
        self._curves: OrderedDict[str, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, patience: float = _SECONDS) -> dict[str, Any]:
        """Return all runs with status, scores and recipe; of many new ones, some recipes come at the next look.

        Args:
            patience: Seconds for recipes that were not read before.
        """
        with self._lock:
            found, cut = self._find()
            self._runs = {identify(path): self._runs.get(identify(path)) or self._new(path) for path in found}
            deadline, unread = time.monotonic() + patience, 0
            for run in self._runs.values():
                if time.monotonic() > deadline:
                    unread += not run.keys and not run.problem
                elif run.has_changed("recipe.yaml"):
                    run.read_recipe()
            rows = [{"id": name, **run.view()} for name, run in self._runs.items()]
        return {"folder": str(self.root), "runs": _without_common_keys(rows), "unread": unread, "cut": cut}

    def curves(self, run: str) -> dict[str, Any] | None:
        """Return the curves of a run by its id; None if there is no such run."""
        with self._lock:
            path = self._path(run)
            if path is None:
                return None
            curves = self._curves.pop(run, None) or Curves(path / "metrics.jsonl")
            self._curves[run] = curves
            while len(self._curves) > _FOLLOWED:
                self._curves.popitem(last=False)
            whole = curves.read(stamp(curves.path))
            return {"id": run, "whole": whole, "panels": curves.panels()}

    def samples(self, run: str) -> bytes | None:
        """Return the picture of some training images of a run, a PNG file; None if there is none."""
        with self._lock:
            path = self._path(run)
        if path is None or (found := stamp(path / "samples.png")) is None or found[1] > _LARGEST_PICTURE:
            return None
        try:
            content = (path / "samples.png").read_bytes()
        except OSError:
            return None
        return content if content.startswith(_PNG) else None

    def _find(self) -> tuple[list[Path], bool]:
        found: list[Path] = []
        for path in find_runs(self.root):
            if len(found) == MOST_RUNS:
                return found, True
            found.append(path)
        return found, False

    def _new(self, path: Path) -> WatchedRun:
        name = path.relative_to(self.root).as_posix() if path != self.root else path.name
        return WatchedRun(path, name.encode("utf-8", "replace").decode("utf-8"))

    def _path(self, run: str) -> Path | None:
        if run not in self._runs:
            self._runs |= {identify(path): self._new(path) for path in self._find()[0] if identify(path) == run}
        return self._runs[run].path if run in self._runs else None


def identify(path: Path) -> str:
    """Return the id of a run directory."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _without_common_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those keys of their recipes alone in which some differ."""
    read = [row["keys"] for row in rows if row["keys"]]
    names = dict.fromkeys(name for keys in read for name in keys)
    kept = [name for name in names if len({json.dumps(keys.get(name)) for keys in read}) > 1]
    return [{**row, "keys": {name: row["keys"][name] for name in kept if name in row["keys"]}} for row in rows]
