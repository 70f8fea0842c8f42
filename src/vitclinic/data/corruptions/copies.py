"""Corrupted copies of a data set, each a data source of its own.

    OUT/fog-3/test-00000-of-00002.parquet   or   OUT/fog-3/test/CLASS/0000012.png and OUT/fog-3/classes.json
    OUT/fog-3/corruption.json               a description of what was copied

A copy is built in OUT/.fog-3.partial, piece by piece, and published by one rename. Each piece is written completely or
not at all, so that a killed command resumes at the piece it was writing; a finished copy is not written again.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from vitclinic._core.errors import DamagedFileError, DataError, MissingExtraError, RecipeError
from vitclinic._core.io import (
    expand_path,
    find_path,
    fingerprint,
    read_json_file,
    sync,
    write_bytes,
    write_errors,
    write_json,
    write_text,
)
from vitclinic._core.lock import hold_lock
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.cache import Progress
from vitclinic.data.config import DataConfig
from vitclinic.data.corruptions.corruption import Corruption, Picture, as_pictures
from vitclinic.data.corruptions.parameters import SMALLEST, list_cells, setting
from vitclinic.data.dataset import Dataset, open_data
from vitclinic.data.decoding import as_image, centre_view
from vitclinic.data.folder import CLASSES_FILE, class_folders
from vitclinic.data.source import SPLITS, subset
from vitclinic.data.split import Split

Form = Literal["parquet", "png"]
FORMS: tuple[Form, ...] = get_args(Form)

DESCRIPTION = "corruption.json"
_PIECE_BYTES = 32 * 2**20
"""Bytes of pixels per piece: what is held in memory, and what a killed command may have to redo."""
_BATCH_VALUES = 2**20
"""Values of the images that are corrupted at a time."""


def corrupt_data(
    data: str | DataConfig | Dataset,
    out: str | Path,
    *,
    corruptions: str | int | Sequence[str] = "all",
    severities: str | int | Sequence[int] = "all",
    form: Form = "parquet",
    split: str = "test",
    limit: int | None = None,
    size: int | None = None,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> list[Path]:
    """Write a corrupted copy of a data set for each corruption and severity.

    Every copy is a data source that `train` and `examine` accept, with the same classes. An interrupted call resumes
    where it stopped, and finished copies are skipped.

    Args:
        data: A data source, its config, or an open data set.
        out: The folder to write to; a copy goes to `out/NAME-SEVERITY`.
        corruptions: Names of corruptions, `15` (the benchmark's) or `all` 19.
        severities: Severities from 1 to 5, or `all`.
        form: `parquet`, or `png` for a folder of images per class.
        split: The split to copy: `train`, `val`, `test` or `all`.
        limit: Copy at most this many images of each split, stratified by class.
        size: Image size in pixels; by default that of the data.
        seed: Seed of the random corruptions.
        progress: Called with (what is being done, how many are done, how many there are).

    Returns:
        The folders of the copies.

    Raises:
        RecipeError: An argument is invalid, or something else is in the place of a copy.
        DataError: The data cannot be read, its images are too small, or the split has no images.
    """
    out = expand_path(str(out), RecipeError)
    cells = [Corruption(name, s, seed) for name, s in list_cells(corruptions, severities)]
    if form not in FORMS:
        raise RecipeError(f"There is no format '{form}': choose {' or '.join(FORMS)}.")
    if form == "parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError("The format parquet (unlike png)", "parquet")
    if split not in (*SPLITS, "all"):
        raise RecipeError(f"There is no split '{split}': choose train, val, test or all.")
    if limit is not None and limit < 1:
        raise RecipeError(f"The limit must be at least 1 (got {limit}).")
    if size is not None and size < SMALLEST:
        raise RecipeError(f"Corruptions need images of at least {SMALLEST} pixels per side (got a size of {size}).")
    _check_place(data, out)
    dataset = data if isinstance(data, Dataset) else open_data(data, size=size, progress=progress)
    setting(cells[0].name, cells[0].severity, dataset.size)  # images that are too small are an error now
    dataset = _select_splits(dataset, split, limit)
    copies = [Copy(dataset, cell, out, form) for cell in cells]
    for copy in copies:
        copy.check()
    total, done = sum(copy.images for copy in copies), 0
    for copy in copies:
        copy.write(partial(_tell, progress, done, total))
        done += copy.images
    return [copy.folder for copy in copies]


def _tell(progress: Progress, before: int, total: int, images: int) -> None:
    progress("corrupting", before + images, total)


def _add(progress: Callable[[int], None], before: int, images: int) -> None:
    progress(before + images)


def _check_place(data: str | DataConfig | Dataset, out: Path) -> None:
    """Reject a place inside the data's own folder, where the copies would become classes of it."""
    source = data if isinstance(data, str) else data.source if isinstance(data, DataConfig) else data.name
    origin = find_path(source, DataError, "data")
    if origin is not None and origin.is_dir() and out.resolve().is_relative_to(origin.resolve()):
        raise RecipeError(f"'{out}' is inside the data folder '{origin}'; choose another output folder.")


def _select_splits(dataset: Dataset, split: str, limit: int | None) -> Dataset:
    """Return the data set with only the splits to copy, at most `limit` images each."""
    wanted = {name: dataset.splits[name] for name in SPLITS if split in (name, "all") and len(dataset.splits[name])}
    if not wanted:
        filled = {name: len(part) for name, part in dataset.splits.items() if len(part)}
        counts = ", ".join(f"{name} ({count})" for name, count in filled.items())
        hint = f"; choose the split {next(iter(filled))} or all" if filled else ""
        raise DataError(f"'{dataset.name}' has no images in its {split} split; it has {counts or 'none'}{hint}.")
    if limit is not None:
        for name, part in wanted.items():
            rows = subset(part.labels, min(limit, len(part)), seed=0)
            wanted[name] = Split(part.images, part.rows[rows], part.labels[rows])
    return replace(dataset, splits=wanted)


@dataclass(frozen=True)
class Piece:
    """Consecutive images of a split, written together."""

    split: str
    number: int
    count: int
    """The number of pieces of the split."""
    rows: range

    @property
    def name(self) -> str:
        """Name of the piece, as in the parquet files of the Hugging Face hub."""
        return f"{self.split}-{self.number:05}-of-{self.count:05}"


class Copy:
    """A copy of a data set under one corruption."""

    def __init__(self, dataset: Dataset, corruption: Corruption, out: Path, form: Form) -> None:
        self.dataset, self.corruption, self.form = dataset, corruption, form
        self.folder = out / f"{corruption.name}-{corruption.severity}"
        self.staging = out / f".{self.folder.name}.partial"
        self.lock = out / f".{self.folder.name}.lock"
        self.images = sum(len(split) for split in dataset.splits.values())

    @property
    def description(self) -> dict[str, Any]:
        rows = {name: (part.rows.tolist(), part.labels.tolist()) for name, part in self.dataset.splits.items()}
        chosen = setting(self.corruption.name, self.corruption.severity, self.dataset.size)
        return {
            "corruption": self.corruption.name,
            "severity": self.corruption.severity,
            "seed": self.corruption.seed,
            "parameters": chosen.parameter_set,
            "data": self.dataset.name,
            "digest": fingerprint(self.dataset.digest, rows),
            "images": {name: len(part) for name, part in self.dataset.splits.items()},
            "size": list(self.dataset.size),
            "format": self.form,
        }

    def check(self) -> None:
        """Raise a RecipeError if something else is in the copy's place."""
        if self.folder.exists() and not self._is_described(self.folder):
            raise RecipeError(
                f"'{self.folder}' already exists and is not this copy; choose another output folder, or delete it."
            )
        if self.folder.exists() and (gone := self._gone()):
            raise RecipeError(f"'{self.folder}' is missing {gone}; delete the folder to have it written again.")

    def _gone(self) -> str | None:
        """Return a file or folder that a finished copy should have and that is missing."""
        if self.form == "parquet":
            names = (f"{piece.name}.parquet" for piece in self._pieces())
            return next((name for name in names if not (self.folder / name).exists()), None)
        kept, counted = self.images, sum(1 for _ in self.folder.glob("*/*/*.png"))
        return f"{kept - counted} of its {kept} images" if counted < kept else None

    def _is_described(self, folder: Path) -> bool:
        """Return True if a folder's description is that of this copy, whatever path its data was given by."""
        found = _read(folder / DESCRIPTION)
        return isinstance(found, dict) and {**found, "data": self.dataset.name} == self.description

    def write(self, progress: Callable[[int], None]) -> None:
        """Make the copy, or what is still to be made of it; `progress` receives how many images are done."""
        if not self.folder.exists() or self.lock.exists():  # a process that was killed at its end leaves its lock file
            with write_errors(self.staging):
                self.staging.parent.mkdir(parents=True, exist_ok=True)
            busy = f"Another process is writing '{self.folder}'; wait for it or stop it."
            with hold_lock(self.lock, busy):
                if not self.folder.exists():  # else another process has finished it in the meantime
                    self._write(progress)
        self.check()
        progress(self.images)

    def _write(self, progress: Callable[[int], None]) -> None:
        with write_errors(self.staging):
            self.staging.mkdir(exist_ok=True)
            if not self._is_described(self.staging):
                for path in self.staging.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                write_json(self.staging / DESCRIPTION, self.description)
        done = 0
        for piece in self._pieces():
            if not self._marker(piece).exists():
                self._write_piece(piece, partial(_add, progress, done))
            done += len(piece.rows)
        with write_errors(self.folder):
            shutil.rmtree(self.staging / ".written", ignore_errors=True)
            if self.form == "png":
                folders = class_folders(self.dataset.classes)
                write_text(
                    self.staging / CLASSES_FILE, json.dumps(dict(zip(folders, self.dataset.classes, strict=True)))
                )
            self.staging.rename(self.folder)
            sync(self.folder.parent)

    def _pieces(self) -> list[Piece]:
        height, width = self.dataset.size
        most = max(1, _PIECE_BYTES // (height * width * self.dataset.channels))
        pieces: list[Piece] = []
        for name, part in self.dataset.splits.items():
            count = -(-len(part) // most)
            starts = range(0, len(part), most)
            pieces += [Piece(name, n, count, range(s, min(s + most, len(part)))) for n, s in enumerate(starts)]
        return pieces

    def _marker(self, piece: Piece) -> Path:
        """Return the file whose presence shows that the piece is complete."""
        if self.form == "parquet":
            return self.staging / f"{piece.name}.parquet"
        return self.staging / ".written" / piece.name

    def _write_piece(self, piece: Piece, progress: Callable[[int], None]) -> None:
        part = self.dataset.splits[piece.split]
        indices = np.arange(piece.rows.start, piece.rows.stop, dtype=np.int64)
        files = self._encode(part, indices, progress)
        labels, names = part.labels[indices], [f"{row:07}.png" for row in part.rows[indices]]
        if self.form == "parquet":
            from vitclinic.data.parquet import parquet_bytes  # which needs pyarrow, an extra

            write_bytes(self._marker(piece), parquet_bytes(files, names, labels, self.dataset.classes))
            return
        folders = class_folders(self.dataset.classes)
        root = self.staging / piece.split
        with write_errors(root):
            for folder in folders:
                (root / folder).mkdir(parents=True, exist_ok=True)
            for content, name, label in zip(files, names, labels, strict=True):
                (root / folders[label] / name).write_bytes(content)
            self._marker(piece).parent.mkdir(exist_ok=True)
        write_text(self._marker(piece), "")

    def _encode(self, part: Split, indices: NDArray[np.int64], progress: Callable[[int], None]) -> list[bytes]:
        """Return the corrupted images as PNG files."""
        height, width = self.dataset.size
        at_a_time = max(1, _BATCH_VALUES // (height * width * self.dataset.channels))
        files: list[bytes] = []
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for start in range(0, len(indices), at_a_time):
                some = indices[start : start + at_a_time]
                x_bhwc = np.ascontiguousarray(centre_view(part.read(some), self.dataset.size))
                corrupted = self.corruption(to_unit_interval(x_bhwc), part.rows[some])
                files += pool.map(_png, as_pictures(corrupted))
                progress(len(files))
        return files


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    as_image(picture).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _read(path: Path) -> Any:
    try:
        return read_json_file(path, DamagedFileError)
    except DamagedFileError:
        return None
