"""A data set as training and measuring see it: classes, an image size, and three splits of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.config import validate
from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint
from vitclinic.data.annotations.store import AnnotationStore, open_annotations
from vitclinic.data.cache import CachedImages, Progress, StreamedImages, cache_key, open_cached_images
from vitclinic.data.config import DataConfig, ImageSpec
from vitclinic.data.decoding import Preprocessing, Size, centre_view, is_photo, storage_size
from vitclinic.data.factory import open_source, survey
from vitclinic.data.shards.images import ShardedImages, ShardRecords
from vitclinic.data.source import SPLITS, Source, assign, assign_values, subset
from vitclinic.data.split import RECORDS, Split, Store, merge_val
from vitclinic.data.text import TextSpec

SMALL_SET_BYTES = 2 * 2**30
"""Sets that decode to no more than this are cached; larger ones are streamed from their files."""

_STATISTICS_FROM = 2000


@dataclass(frozen=True)
class Dataset:
    """An open data set: its classes, image size and channels, and the train, val and test splits.

    Example:
        >>> dataset = open_data("digits")
        >>> dataset.size, dataset.channels, len(dataset.classes), len(dataset.train)
        ((8, 8), 1, 10, 1437)
    """

    name: str
    classes: tuple[str, ...]
    size: Size
    channels: int
    splits: Mapping[str, Split]
    digest: str
    skipped: list[str] = field(default_factory=list)
    undivided: bool = False
    """True if all splits are the same images, because the loader was not divided into splits."""
    preprocessing: Preprocessing | None = None
    """The way from an image file to what evaluation sees; None if there are no files."""
    target: str = "class"
    """What the images come with, and `classes` are of: a `class`, a `mask`, `objects` or `questions`."""
    text: TextSpec | None = None
    """How questions become numbers, where images come with questions."""

    @property
    def spec(self) -> ImageSpec:
        """Shape of the images and number of classes that a network for this data set must have."""
        return ImageSpec(len(self.classes), self.channels, self.size, self.text)

    @property
    def scores_val(self) -> bool:
        """True if its test images are those of val, because it has no others and none are held out."""
        same = self.test.images is self.val.images and np.array_equal(self.test.rows, self.val.rows)
        return len(self.test) > 0 and same and not self.undivided

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, in [0, 1], over (at most 2,000 of) the training images."""
        self.check_trainable()
        count, images = len(self.train), self.train.images
        rows = np.unique(np.linspace(0, count - 1, min(count, _STATISTICS_FROM)).astype(np.int64))
        if isinstance(images, ShardedImages):
            rows = images.choose(self.train.rows, _STATISTICS_FROM)
        total, squares, pixels = np.zeros(self.channels), np.zeros(self.channels), 0
        for part in np.array_split(rows, -(-len(rows) // 100)):  # large photographs are many bytes
            values = centre_view(self.train.read(part), self.size).reshape(-1, self.channels) / 255.0
            total, squares, pixels = total + values.sum(0), squares + (values**2).sum(0), pixels + len(values)
        mean = total / pixels
        deviation = np.sqrt(np.maximum(squares / pixels - mean**2, 1e-6))
        return mean.tolist(), deviation.tolist()

    def check_trainable(self) -> None:
        """Check that there are training images.

        Raises:
            DataError: There are none, as in a copy of a test split.
        """
        if not len(self.train):
            raise DataError(f"'{self.name}' has no training images; it can be examined but not trained on.")

    @property
    def train(self) -> Split:
        """Training images."""
        return self.splits["train"]

    @property
    def val(self) -> Split:
        """Validation images."""
        return self.splits["val"]

    @property
    def test(self) -> Split:
        """Test images."""
        return self.splits["test"]

    @property
    def unseen(self) -> Split:
        """Images to measure a network on that was trained elsewhere: a split that the source itself has.

        This is the test split or, without one, the val split. If the source is not divided, it is all images: the ones
        held out as a test split are for networks that were trained on the rest.
        """
        first = next(split for split in (self.test, self.val, self.train) if len(split))
        together = [split for split in self.splits.values() if split.images is first.images and len(split)]
        rows = np.concatenate([split.rows for split in together])
        order = np.argsort(rows, kind="stable")
        labels = np.concatenate([split.labels for split in together])[order]
        return Split(first.images, rows[order], labels, annotations=first.annotations)


def open_data(
    config: DataConfig | str,
    *,
    size: int | Size | None = None,
    channels: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Dataset:
    """Open a data source and prepare it for reading.

    Images are decoded once per machine and then read from a cache; sets too large for it are decoded as they are read.
    Missing val and test splits are held out of the training images, stratified by class.

    Args:
        config: A source, such as a folder, a parquet file, `torchvision:NAME@FOLDER`, `hf:NAME`, `digits` or `shapes`;
            or a full `DataConfig`.
        size: Image size, or (height, width); by default that of the images.
        channels: 1 (grey) or 3 (RGB); by default those of the images.
        progress: Called with (what is being done, how many are done, how many there are).

    Returns:
        The data set with its train, val and test splits.

    Raises:
        DataError: The source does not exist, has no training images, or an image cannot be read.
        MissingExtraError: The source needs a package that is not installed.

    Example:
        >>> dataset = open_data(DataConfig(source="digits", limit=100))
        >>> {name: len(split) for name, split in sorted(dataset.splits.items())}
        {'test': 180, 'train': 100, 'val': 180}
    """
    if isinstance(config, str):
        config = validate(DataConfig, {"source": config}, where="data")
    source = open_source(config, progress)
    source.classes_of(config.target)
    way = find_preprocessing(source, size, channels, progress, margin=config.target == "class")
    stores = _stores(source, config, way, progress)
    return assemble(source, config, stores, way, Dataset, _open_annotations(source, config, stores, way, progress))


def find_preprocessing(
    source: Source,
    size: int | Size | None,
    channels: int | None,
    progress: Progress = lambda what, done, total: None,
    margin: bool = True,
) -> Preprocessing:
    """Return the way from the image files of a source to the pixels that evaluation sees; arguments of `open_data`.

    With `margin`, photographs are stored a little larger than they are evaluated; annotated ones are evaluated whole.
    """
    found = survey(source, progress)
    wanted = (size, size) if isinstance(size, int) else size or found.size
    depth = channels or found.channels
    framed = storage_size(wanted, found.shorter_side) if margin else wanted
    return Preprocessing(wanted, framed, depth, whole=is_photo(wanted) and not _is_small(source, framed, depth))


def _is_small(source: Source, framed: Size, channels: int) -> bool:
    """Return True if the decoded images of a source are cached; those in shards never are."""
    if isinstance(source.main, ShardRecords):
        return False
    count = sum(len(records) for records in source.splits.values())
    return count * framed[0] * framed[1] * channels <= SMALL_SET_BYTES


def _stores(source: Source, config: DataConfig, way: Preprocessing, progress: Progress) -> dict[str, Store]:
    framed, channels, stores = way.framed, way.channels, dict[str, Store]()
    small = _is_small(source, framed, channels)
    for split, records in source.splits.items():
        if small:
            key = cache_key(source.fingerprint, split, framed, channels, config.on_error)
            stores[split] = open_cached_images(records, key, framed, channels, config.on_error, progress)
        elif isinstance(records, ShardRecords):
            stores[split] = ShardedImages(records, way.size, framed, channels, config, progress)
        else:
            stores[split] = StreamedImages(records, way.size, framed, channels, config.on_error, progress)
        RECORDS[stores[split]] = records
    return stores


def _open_annotations(
    source: Source, config: DataConfig, stores: Mapping[str, Store], way: Preprocessing, progress: Progress
) -> dict[str, AnnotationStore]:
    """Return the annotations of each split of the source that the config asks for."""
    if config.target == "class":
        return {}
    found = {}
    for split, store in stores.items():
        assert isinstance(store, CachedImages | StreamedImages)
        key = cache_key(source.fingerprint, f"{split} {config.target}", way.framed, 1, config.on_error)
        number, own_size = len(source.classes_of(config.target)), None if source.uniform is None else source.uniform[0]
        of_split = (source.splits[split], store, number, key, way.framed, progress, own_size)
        found[split] = open_annotations(config.target, *of_split)
    return found


def _read_text(config: DataConfig, train: Split) -> TextSpec | None:
    """Return how the questions about training images become numbers; None if there are none."""
    if config.target != "questions" or train.annotations is None:
        return None
    found = train.annotate(np.arange(len(train)))
    questions = [question.text for annotation in found for question in annotation.questions]
    if config.vocabulary is not None:
        return TextSpec.read(config.vocabulary, questions)
    return TextSpec.of_questions(questions)


Kind = TypeVar("Kind", bound=Dataset)


def assemble(
    source: Source,
    config: DataConfig,
    stores: dict[str, Store],
    way: Preprocessing,
    kind: type[Kind],
    annotations: Mapping[str, AnnotationStore] = MappingProxyType({}),
) -> Kind:
    """Put a data set together from a source, the stores of its splits and the way to their pixels."""
    classes = source.classes_of(config.target)
    labels = {split: source.splits[split].labels[store.kept] for split, store in stores.items()}
    if "train" in labels and not len(labels["train"]):
        raise DataError(f"'{source.name}' has no readable training image.")
    splits: dict[str, Split] = {}
    groups = None if config.group is None else source.read_column(config.group, "group")
    for split, (origin, rows) in _assign(source, config, stores, labels).items():
        of_split = None if groups is None else groups[origin][stores[origin].kept][rows]
        asked = None if source.queries is None or origin != "test" else source.queries[stores[origin].kept][rows]
        of_origin = stores[origin], rows, labels[origin][rows], of_split, annotations.get(origin)
        splits[split] = Split(*of_origin, queries=asked)
    if config.train_on_val:
        _check_joint(source, splits)
        splits |= merge_val(splits["train"], splits["val"])
    splits["train"] = _limit_train(splits["train"], config)
    contents = [classes, way.size, way.channels, [(s, stores[s].digest) for s in SPLITS if s in stores]]
    if annotations:
        contents.append([config.target, *(annotations[s].digest for s in SPLITS if s in annotations)])
    if source.queries is not None:
        contents.append(["queries", *np.flatnonzero(source.queries).tolist()])
    skipped = [*source.notes, *(note for store in stores.values() for note in store.skipped)]
    facts = (way.size, way.channels, splits, fingerprint(*contents), skipped)
    text = _read_text(config, splits["train"])
    return kind(source.name, classes, *facts, preprocessing=way, target=config.target, text=text)


def _limit_train(train: Split, config: DataConfig) -> Split:
    count = config.limit
    if config.fraction is not None:
        count = max(1, round(config.fraction * len(train)))
    if count is None:
        return train
    if count > len(train):
        raise DataError(f"data.limit is {count}, but there are only {len(train)} training images.")
    return train.take(subset(train.labels, count, config.split_seed))


def _check_joint(source: Source, splits: Mapping[str, Split]) -> None:
    """Raise a DataError if train and val lie in different shards: there is no window over both."""
    if isinstance(source.main, ShardRecords) and splits["train"].images is not splits["val"].images:
        raise DataError(
            f"'data.train_on_val': '{source.name}' has shards of its own for val; name them as training shards instead."
        )


def _assign(
    source: Source, config: DataConfig, stores: Mapping[str, Store], labels: dict[str, NDArray[np.int64]]
) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """Return the source split and rows of each split, by class or by whole values of `split_by`.

    Whole shards are held out where a shard is no more than the share: validation then reads a few shards, not all.
    """
    split_by, main = config.split_by, source.main
    if split_by is None and isinstance(main, ShardRecords) and len(main.shards) * config.held_out >= 1:
        split_by = "shard"
    if split_by is None or "train" not in labels:
        return assign(labels, config.split_seed, config.held_out)
    if split_by == "label":
        values = labels["train"]
    else:
        values = source.read_column(split_by, "split_by")["train"][stores["train"].kept]
    return assign_values(labels, values, config.split_seed, config.held_out)
