"""The common base of predictions: workers decode images beside the network, and all results are written alike.

Images are prepared exactly as the run's own test images were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from vitclinic._core.callback import Callback
from vitclinic._core.distributed import pick_device
from vitclinic._core.errors import DataError, RecipeError, first_line
from vitclinic._core.io import refuse_special
from vitclinic.data.annotations.annotation import upright_size
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.decoding import UNREADABLE, Preprocessing, Size, storage_size
from vitclinic.data.stream import read_ahead, spare_workers
from vitclinic.deployment.images import SUFFIXES, Asked, Row, check_output, open_rows
from vitclinic.exam.targets import Network, Target, resolve

TOP_K, BATCH_SIZE = 5, 64

Input = str | Image.Image | Asked


class Decoded(NamedTuple):
    """Some images, and why others could not be read, by name."""

    names: list[str]
    images: Tensor
    skipped: dict[str, str]
    places: list[int]
    """Where the images are among all."""
    sizes: list[Size]
    """Height and width of the images as they are shown."""


class ImageStream(TorchDataset[Decoded]):
    """Batches of images by their places, decoded and prepared for a network."""

    def __init__(self, images: Sequence[str | Image.Image], preprocessing: Preprocessing) -> None:
        self.images, self.preprocessing = images, preprocessing

    def __getitem__(self, places: range) -> Decoded:
        found: list[tuple[str, int, Size, NDArray[np.uint8]]] = []
        skipped = {}
        for place in places:
            image = self.images[place]
            name = image if isinstance(image, str) else f"image {place}"
            try:
                found.append((name, place, *self._read(image)))
            except (*UNREADABLE, DataError) as error:
                skipped[name] = _explain(error)
        pixels = [each[3] for each in found]
        empty = np.empty((0, *self.preprocessing.size, self.preprocessing.channels), np.uint8)
        images = to_unit_interval(np.stack(pixels) if pixels else empty)
        names, numbers, sizes = ([each[column] for each in found] for column in range(3))
        return Decoded(names, images, skipped, numbers, sizes)  # type: ignore[arg-type]

    def _read(self, image: str | Image.Image) -> tuple[Size, NDArray[np.uint8]]:
        if not isinstance(image, str):
            return upright_size(image), self.preprocessing(image)
        refuse_special(Path(image))
        with Image.open(image) as opened:
            return upright_size(opened), self.preprocessing(opened)


def _explain(error: Exception) -> str:
    """Return why an image cannot be read, in a few words; its name stands before them."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return first_line(error)


class Results(ABC):
    """Base of what is predicted of some images, a dataclass; it knows its rows, and writes them."""

    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    """Those of files that can be written."""
    columns: ClassVar[tuple[str, ...] | None] = None
    """The columns of a table without rows, where there may be none."""
    files: list[str]
    """The images, in order."""
    classes: tuple[str, ...]
    skipped: dict[str, str]
    """Why some images could not be read, by file."""

    def __len__(self) -> int:
        return len(self.files)

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the rows of a table."""

    def save(self, places: Mapping[str, Path]) -> None:
        """Write what does not fit into a table at the place of each image, if it has one; rows then name it."""
        return None

    @staticmethod
    def choose_places(files: Sequence[str], out: Path) -> dict[str, Path]:
        """Return where `save` writes what belongs to each image, beside the table `out`."""
        return {}

    def write(self, path: str | Path, *how: Any, **keywords: Any) -> Path:
        """Write a file, .csv, .jsonl or .parquet, which appears whole; further arguments are those of `rows`."""
        check_output(Path(path), self.suffixes)
        self.save(self.choose_places(self.files, Path(path)))
        with open_rows(Path(path), self.columns) as write:
            write(self.rows(*how, **keywords))
        return Path(path)


Found = TypeVar("Found", bound=Results)


def join(parts: Sequence[Found]) -> Found:
    """Return the results of several batches, at least one, as one."""
    columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(parts[0])}  # type: ignore[arg-type]
    return type(parts[0])(**{name: _join(values) for name, values in columns.items()})


def _join(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    if isinstance(values[0], dict):
        return {key: one for value in values for key, one in value.items()}
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]


class ImagePredictor(ABC, Generic[Found]):
    """Base of networks that are ready to predict something of images.

    Args:
        target: A run, one of its checkpoints, a network, or what `vitclinic examine` takes.
        size: Pixels a side, for networks that take any.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        callback: Follows the progress.
    """

    results: ClassVar[type[Results]]
    """What it returns."""
    classes: tuple[str, ...]

    def __init__(
        self, target: Target, *, size: int | None = None, device: str = "auto", callback: Callback | None = None
    ) -> None:
        self.callback = callback or Callback()
        self.device = pick_device(device)
        self.target = resolve(target, self.device)
        self.preprocessing = _find_preprocessing(self.target, size)
        self.network = self.target.network
        self.classes = self.target.output_names or ()

    @abstractmethod
    def read(self, decoded: Decoded) -> Found:
        """Return what is predicted of decoded images; of none, a result without images."""

    def stream(
        self, images: Sequence[Input], batch_size: int = BATCH_SIZE, workers: int | None = None
    ) -> Iterator[Found]:
        """Yield predictions of the images, in order, a batch at a time."""
        if batch_size < 1:
            raise RecipeError(f"'batch_size' must be at least 1 (got {batch_size}).")
        self.check(images)
        self.prepare()
        plain = [one.image if isinstance(one, Asked) else one for one in images]
        count, done = len(images), 0
        requests = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        if workers is None:
            workers = spare_workers() if len(requests) > 1 else 0
        for decoded in read_ahead(ImageStream(plain, self.preprocessing), requests, workers):
            found = self.read(decoded)
            done += len(decoded.names) + len(decoded.skipped)
            self.callback.on_progress("predicting", done, count)
            yield found

    def check(self, images: Sequence[Input]) -> None:
        """Raise for images that come with what is of no use here."""
        if any(isinstance(one, Asked) for one in images):
            raise RecipeError(f"A table of questions is for runs of the task vqa, and '{self.target.name}' is none.")

    def prepare(self) -> None:
        """Do what has to be done once, before the first image."""
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader should know about the numbers."""
        return {}

    def describe(self, rows: int, out: Path | None) -> str:
        """Return in a few words what was predicted, in so many rows."""
        return f"{rows} rows"

    def collect(self, images: Sequence[Input], batch_size: int = BATCH_SIZE, workers: int | None = None) -> Found:
        """Return the predictions of all images.

        Raises:
            DataError: None of them can be read.
        """
        nothing = Decoded([], ImageStream([], self.preprocessing)[range(0)].images, {}, [], [])
        parts = list(self.stream(images, batch_size, workers))
        found = join([self.read(nothing), *parts])
        refuse_nothing_read(len(images), found.skipped, len(found))
        return found


def refuse_nothing_read(count: int, skipped: Mapping[str, str], read: int) -> None:
    """Raise a DataError if there are images, and none could be read."""
    if skipped and not read:
        name, why = next(iter(skipped.items()))
        raise DataError(f"None of the {count} images can be read; '{name}': {why}.")


def _find_preprocessing(target: Network, size: int | None) -> Preprocessing:
    known = getattr(target.network, "preprocessing", None)
    fixed = known.size if isinstance(known, Preprocessing) else target.size
    if size is not None and fixed not in (None, (size, size)):
        height, width = fixed
        raise RecipeError(f"'{target.name}' takes images of {height} x {width} pixels and no others; remove `size`.")
    if isinstance(known, Preprocessing):
        return known
    backbone: Any = getattr(target.network, "backbone", target.network)
    published = getattr(backbone, "pretrained_cfg", None) or {}
    wanted = target.size or (size and (size, size)) or published.get("input_size", (0, 0, 0))[1:]
    if not all(wanted):
        raise RecipeError(f"'{target.name}' does not say which images it takes; give `size`, their pixels a side.")
    height, width = wanted
    return Preprocessing((height, width), storage_size((height, width), float("inf")), target.channels or 3)
