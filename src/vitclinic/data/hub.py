"""`data=hf:NAME`: a data set of the Hugging Face hub, or a local folder that `datasets` can load."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from vitclinic.data.source import Records, Source, fingerprint
from vitclinic.errors import DataError, MissingExtraError

_SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "valid": "val", "test": "test"}


class HubRecords:
    """The rows of a `datasets.Dataset`, images left encoded until they are read."""

    def __init__(self, name: str, dataset: Any, image: str, label: str) -> None:
        import datasets

        self.source = name
        self.image = image
        self.dataset = dataset.cast_column(image, datasets.Image(decode=False)).select_columns([image])
        self.labels = np.asarray(dataset[label], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.source} row {index}"

    def read(self, index: int) -> Image.Image:
        record = self.dataset[index][self.image]
        if record["bytes"] is not None:
            return Image.open(io.BytesIO(record["bytes"]))
        return Image.open(record["path"])

    def contents(self) -> list[int]:
        return list(range(len(self)))


def open_hub(spec: str) -> Source:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"data={spec}", "hf") from None
    name = spec.removeprefix("hf:")
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"'{spec}' could not be loaded by the datasets library: {reason}") from error
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
