"""Data sets known by name: those that come with vitclinic, and published ones.

`data=digits` and `data=shapes` come with vitclinic. `data=hf:NAME` is a data set of the Hugging Face hub, or a local
folder that `datasets` can load; `data=torchvision:NAME@FOLDER` is one of torchvision's, which must already be in that
folder. `data=imagenet`, as the papers' recipes and studies have it, means the published set, wherever the user's copy
lies: without a copy, a dry run still knows how many images there are, and of what kind.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError, MissingExtraError, did_you_mean
from vitclinic._core.io import find_path, fingerprint
from vitclinic.data import shapes
from vitclinic.data.source import NumberedRecords, Records, Source
from vitclinic.data.text import MOST_TOKENS, SPECIAL, TextSpec

_DIGITS = Path(__file__).with_name("digits.npz")
_SHAPES_DEFAULT = {"n": 4000, "texture": 0.0}
_SHAPES_VAL, _SHAPES_TEST = 500, 1000
_MOST_SHAPES = 10_000_000


class ArrayRecords(NumberedRecords):
    """Images in an array, [n, height, width] or [n, height, width, 3], one label each."""

    def __init__(self, source: str, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        super().__init__(source, labels)
        self.images = images

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        yield from self.images


class ShapesRecords:
    """Images of the procedural set, drawn as they are read."""

    def __init__(self, seed: int, split: str, count: int, texture_cue: float) -> None:
        self.seed, self.split, self.count, self.texture_cue = seed, split, count, texture_cue
        self.labels = np.arange(count, dtype=np.int64) % len(shapes.CLASSES)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"shapes {self.split} image {index}"

    def read(self, index: int) -> Image.Image:
        image, _, _ = shapes.example(self.seed, self.split, index, self.texture_cue)
        return Image.fromarray(image)

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        yield from shapes.examples(self.seed, self.split, self.count, self.texture_cue)

    def contents(self) -> list[int]:
        return list(range(len(self)))


def open_digits() -> Source:
    """Open the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels, grey.

    They are the test set of Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998 (CC BY 4.0): 17 grey levels, here stretched to 0..255.
    """
    with np.load(_DIGITS, allow_pickle=False) as stored:
        images, labels = np.rint(stored["images"] * (255 / 16)).astype(np.uint8), stored["labels"]
    records = ArrayRecords("digits", images, labels)
    return Source("digits", tuple(str(d) for d in range(10)), {"train": records}, fingerprint("digits", 1), ((8, 8), 1))


def open_shapes(spec: str, seed: int) -> Source:
    """Open `shapes`, `shapes:2000` or `shapes:n=2000,texture=0.8` (see `vitclinic.data.shapes`)."""
    options = _shapes_options(spec)
    count, cue = int(options["n"]), options["texture"]
    sizes = {"train": count, "val": _SHAPES_VAL, "test": _SHAPES_TEST}
    splits = {split: ShapesRecords(seed, split, size, cue) for split, size in sizes.items()}
    version = fingerprint("shapes", shapes.VERSION, seed, sizes, cue)
    return Source(spec, shapes.CLASSES, splits, version, ((32, 32), 3))


def _shapes_options(spec: str) -> dict[str, float]:
    given: dict[str, float] = {}
    for item in filter(None, spec.partition(":")[2].split(",")):
        match = re.fullmatch(r"(?:n=)?(\d{1,20})|(texture)=(\d+\.?\d*|\.\d+)", item.strip())
        if match is None:
            raise DataError(f"'{spec}': cannot parse '{item}'; write shapes:2000 or shapes:n=2000,texture=0.8.")
        key = match[2] or "n"
        if key in given:
            raise DataError(f"'{spec}' has two values of {key}; write one.")
        given[key] = float(match[1] or match[3])
    options = {**_SHAPES_DEFAULT, **given}
    if not 1 <= options["n"] <= _MOST_SHAPES or not 0 <= options["texture"] <= 1:
        raise DataError(f"'{spec}': n must be from 1 to {_MOST_SHAPES:,} and texture between 0 and 1.")
    return options


@dataclass(frozen=True)
class NamedData:
    """A published data set of colour images."""

    title: str
    splits: Mapping[str, int]
    """How many images each of its own splits has."""
    classes: int
    size: int | tuple[int, int]
    """Pixels a side, or height and width, as networks are trained on it."""
    target: str = "class"
    """What its images come with."""
    tokens: int = 0
    """How many tokens its questions are made of."""

    @property
    def text(self) -> TextSpec | None:
        """The numbers that its questions become; the words themselves are not known."""
        if not self.tokens:
            return None
        return TextSpec((*SPECIAL, *(str(number) for number in range(self.tokens - len(SPECIAL)))), MOST_TOKENS)

    def as_source(self) -> Source:
        """Return its classes and labels as a source without images; the labels are in turn."""
        splits: dict[str, Records] = {
            split: AbsentRecords(f"{self.title} {split}", np.arange(count) % self.classes)
            for split, count in self.splits.items()
        }
        classes = tuple(str(number) for number in range(self.classes))
        targets = {} if self.target == "class" else {self.target: classes}
        own = classes if self.target == "class" else ()
        shape = ((self.size, self.size) if isinstance(self.size, int) else self.size, 3)
        return Source(self.title, own, splits, fingerprint("named", self.title), shape, targets=targets)


NAMED_DATA = {
    "ade20k": NamedData("ADE20K", {"train": 20_210, "val": 2_000}, 150, 512, target="mask"),
    "cifar10": NamedData("CIFAR-10", {"train": 50_000, "test": 10_000}, 10, 32),
    "cifar100": NamedData("CIFAR-100", {"train": 50_000, "test": 10_000}, 100, 32),
    "cityscapes": NamedData("Cityscapes", {"train": 2_975, "val": 500}, 19, (1024, 2048), target="mask"),
    "coco": NamedData("COCO 2017", {"train": 118_287, "val": 5_000}, 80, 800, target="objects"),
    "imagenet": NamedData("ImageNet", {"train": 1_281_167, "val": 50_000}, 1000, 224),
    "imagenet21k": NamedData("ImageNet-21k", {"train": 14_197_122}, 21_843, 224),
    "market1501": NamedData("Market-1501", {"train": 12_936, "test": 19_732}, 751, 256),
    "vqa2": NamedData("VQA v2", {"train": 82_783, "val": 40_504}, 3129, 384, target="questions", tokens=30_522),
}


def find_missing_data(source: str) -> NamedData | None:
    """Return the published set that a source names, unless there is a file or folder of that name."""
    named = NAMED_DATA.get(source)
    return None if named is None or Path(source).exists() else named


class AbsentRecords(NumberedRecords):
    """Images that are not here, of which only the labels are known."""

    def read(self, index: int) -> Image.Image:
        raise DataError(f"{self.name(index)} is not here: only the facts of this data set are known.")


_SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "valid": "val", "test": "test"}


class HubRecords(NumberedRecords):
    """Rows of a `datasets.Dataset`; images stay encoded until they are read."""

    def __init__(self, name: str, dataset: Any, image: str, label: str) -> None:
        import datasets

        super().__init__(name, dataset[label])
        self.image = image
        self.dataset = dataset.cast_column(image, datasets.Image(decode=False)).select_columns([image])

    def name(self, index: int) -> str:
        return f"{self.source} row {index}"

    def read(self, index: int) -> Image.Image:
        record = self.dataset[index][self.image]
        if record["bytes"] is not None:
            return Image.open(io.BytesIO(record["bytes"]))
        return Image.open(record["path"])


def open_hub(spec: str) -> Source:
    """Open `hf:NAME`."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"data={spec}", "hf") from None
    name = spec.removeprefix("hf:")
    try:
        found = datasets.load_dataset(name)
    except Exception as error:  # it runs readers of many formats on what may be any folder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"'{spec}' could not be loaded by the datasets library: {reason.rstrip('.')}.") from error
    features = next(iter(found.values())).features
    image = _column(features, datasets.Image, spec, "image")
    label = _column(features, datasets.ClassLabel, spec, "class label")
    splits: dict[str, Records] = {
        _SPLIT_NAMES[split]: HubRecords(f"{name} {split}", rows, image, label)
        for split, rows in found.items()
        if split in _SPLIT_NAMES
    }
    if "train" not in splits:
        raise DataError(f"'{spec}' has no train split; it has {', '.join(found)}.")
    prints = [str(rows._fingerprint) for rows in found.values()]
    return Source(spec, tuple(features[label].names), splits, fingerprint("hf", name, prints))


def _column(features: Any, kind: type, spec: str, what: str) -> str:
    for name, feature in features.items():
        if isinstance(feature, kind):
            return str(name)
    raise DataError(f"'{spec}' has no {what} column; its columns are {', '.join(features)}.")


KNOWN_SETS = (
    "CIFAR10",
    "CIFAR100",
    "Caltech101",
    "DTD",
    "EuroSAT",
    "FGVCAircraft",
    "FashionMNIST",
    "Flowers102",
    "Food101",
    "GTSRB",
    "KMNIST",
    "MNIST",
    "OxfordIIITPet",
    "PCAM",
    "QMNIST",
    "RenderedSST2",
    "STL10",
    "SVHN",
    "StanfordCars",
    "USPS",
)


class TorchvisionRecords(NumberedRecords):
    """Pairs (image, label) of a torchvision data set."""

    def __init__(self, name: str, dataset: Any) -> None:
        super().__init__(name, _torchvision_labels(dataset))
        self.dataset = dataset

    def read(self, index: int) -> Image.Image:
        image: Image.Image = self.dataset[index][0]
        return image


def open_torchvision(spec: str) -> Source:
    """Open `torchvision:NAME@FOLDER`."""
    name, _, root = spec.removeprefix("torchvision:").partition("@")
    if name not in KNOWN_SETS:
        raise DataError(f"'{name}' is not a supported torchvision data set.{did_you_mean(name, KNOWN_SETS)}")
    folder = find_path(root, DataError, "the data set") if root else None
    if folder is None or not folder.is_dir():
        raise DataError(f"'{spec}': add the folder that contains the data set, as in torchvision:{name}@/path/to/it.")
    from torchvision import datasets

    root, factory = str(folder), getattr(datasets, name)
    found = {split: _build(factory, root, kind) for split, kind in _split_arguments(factory).items()}
    found["train"] = found["train"] or _build(factory, root, {"split": "trainval"})  # all that OxfordIIITPet has
    splits: dict[str, Records] = {
        split: TorchvisionRecords(f"{name} {split}", dataset) for split, dataset in found.items() if dataset
    }
    if "train" not in splits:
        raise DataError(f"torchvision cannot find {name} in '{root}'; download it there first.")
    files = sorted((str(p), p.stat().st_size) for p in Path(root).rglob("*") if p.is_file())
    return Source(spec, _torchvision_classes(found["train"], splits), splits, fingerprint("torchvision", name, files))


def _split_arguments(factory: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments that select each split: `train=True`, `split='train'`, or none at all."""
    parameters = inspect.signature(factory).parameters
    if "train" in parameters:
        return {"train": {"train": True}, "test": {"train": False}}
    if "split" in parameters:
        return {split: {"split": split} for split in ("train", "val", "test")}
    return {"train": {}}


def _build(factory: Any, root: str, arguments: dict[str, Any]) -> Any | None:
    try:
        return factory(root, download=False, **arguments)
    except (RuntimeError, ValueError, OSError, TypeError):  # not there, or no such split
        return None


def _torchvision_labels(dataset: Any) -> list[int]:
    for attribute in ("targets", "labels", "_labels", "y"):
        values = getattr(dataset, attribute, None)
        if values is not None:
            return [int(value) for value in values]
    return [int(dataset[i][1]) for i in range(len(dataset))]


def _torchvision_classes(dataset: Any, splits: dict[str, Records]) -> tuple[str, ...]:
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    if names:
        return tuple(str(name) for name in names)
    return tuple(str(label) for label in range(max(int(r.labels.max()) for r in splits.values()) + 1))
