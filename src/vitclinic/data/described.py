"""A data set of which all is known but the pixels: what a plan, or a dry run, needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import DataError
from vitclinic.data.annotations.store import AnnotationStore, read_questions
from vitclinic.data.cache import Progress
from vitclinic.data.config import DataConfig
from vitclinic.data.dataset import Dataset, assemble, find_preprocessing
from vitclinic.data.decoding import Images, Size
from vitclinic.data.factory import open_source
from vitclinic.data.named import find_missing_data
from vitclinic.data.source import Source
from vitclinic.data.split import Store


class DescribedDataset(Dataset):
    """A data set of which all is known but the pixels."""

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation to build a network with, of no particular images."""
        self.check_trainable()
        return [0.5] * self.channels, [0.25] * self.channels


@dataclass
class _Undecoded:
    """Store of images that nobody reads."""

    name: str
    kept: NDArray[np.int64]
    digest: str = ""
    skipped: list[str] = field(default_factory=list)

    def read(self, indices: NDArray[np.int64]) -> Images:
        raise DataError(f"The images of '{self.name}' were described, not decoded; open the data to read them.")


def describe_data(
    config: DataConfig,
    *,
    size: int | Size | None = None,
    channels: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> DescribedDataset:
    """Return what `open_data` would open, without decoding an image.

    A published data set that is not here is known by its name (`NAMED_DATA`).

    Args:
        config: The section `data` of a recipe.
        size: Image size, or (height, width); by default that of the images.
        channels: 1 (grey) or 3 (RGB); by default those of the images.
        progress: Called with (what is being done, how many are done, how many there are).

    Raises:
        DataError: As `open_data`, but for what decoding the images would show.

    Example:
        >>> imagenet = describe_data(DataConfig(source="imagenet", held_out=0))
        >>> len(imagenet.train), imagenet.spec
        (1281167, ImageSpec(num_classes=1000, in_chans=3, img_size=(224, 224)))
    """
    named = find_missing_data(config.source)
    source = open_source(config, progress) if named is None else named.as_source()
    stores: dict[str, Store] = {
        split: _Undecoded(source.name, np.arange(len(records), dtype=np.int64))
        for split, records in source.splits.items()
    }
    source.classes_of(config.target)
    way = find_preprocessing(source, size, channels, progress, margin=config.target == "class")
    known = open_questions(source, config, stores) if named is None else {}
    described = assemble(source, config, stores, way, DescribedDataset, known)
    return described if named is None else replace(described, text=named.text)


def open_questions(source: Source, config: DataConfig, stores: Mapping[str, Store]) -> dict[str, AnnotationStore]:
    """Return the questions of each split of the source, if the config asks for them: they need no image."""
    if config.target != "questions":
        return {}
    return {split: read_questions(source.splits[split], store.kept) for split, store in stores.items()}
