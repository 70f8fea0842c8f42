"""Images in shards: how they are read, in which order, and ahead of time.

The order belongs to (seed, epoch): the shards are permuted, and the images of each `data.window` shards in a row are
shuffled together. Every place of the stream is known from that, so that any number of workers and processes reads the
same samples, a run goes on in the middle of a shard, and the shards that come next are fetched ahead.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import VitclinicError
from vitclinic._core.io import fingerprint
from vitclinic.data.cache import Progress, StreamedImages
from vitclinic.data.config import DataConfig
from vitclinic.data.decoding import Pixels, Size
from vitclinic.data.randomness import SampleOrder, generator
from vitclinic.data.shards.copies import OpenShard, fetch
from vitclinic.data.shards.index import Index, read_index
from vitclinic.data.shards.names import Shard
from vitclinic.data.split import Split

_LOOKED_AT = 8
"""Shards that the size of images and the statistics of their channels are taken from."""


class ShardRecords:
    """Images in shards, one label each. What is open belongs to a process, and is no part of a copy."""

    def __init__(
        self, shards: Sequence[Shard], indexes: Sequence[Index], labels: NDArray[np.int64], opened: int
    ) -> None:
        counts = [len(index.labels) for index in indexes]
        self.shards, self.labels, self.most_open = shards, labels, opened
        self.firsts = np.cumsum([0, *counts])
        self.numbers = np.repeat(np.arange(len(shards)), counts)
        """Shard of each image."""
        self.starts = np.concatenate([np.asarray(index.starts, np.int64) for index in indexes])
        self.lengths = np.concatenate(
            [np.asarray(index.lengths or [0] * len(index.starts), np.int64) for index in indexes]
        )
        self.columns = {"shard": self.numbers}
        self.column_values = {"shard": np.asarray([shard.url for shard in shards], dtype=str)}
        self._contents = [
            [fingerprint(index.names, index.lengths), shard.size if shard.is_parquet else 0, len(index.labels)]
            for shard, index in zip(shards, indexes, strict=True)
        ]
        self._own: _Own | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None}

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        number, row = int(self.numbers[index]), int(index - self.firsts[self.numbers[index]])
        shard = self.shards[number]
        if shard.is_parquet:
            return f"{shard.url} row {self.starts[index]}"
        with suppress(VitclinicError):
            return f"{shard.url} '{read_index(shard).names[row]}'"
        return f"{shard.url} image {row}"

    def contents(self) -> list[Any]:
        """Return what each shard holds, wherever it lies."""
        return self._contents

    def open(self, index: int) -> OpenShard:
        """Open the shard of an image, fetching it first if it is not here."""
        return self._of_process().open(self.shards, int(self.numbers[index]), self.most_open)

    def read(self, index: int) -> Image.Image:
        shard = self.open(index)
        with self._of_process().lock:
            data = shard.read(int(self.starts[index]), int(self.lengths[index]))
        if not data:
            raise OSError("it contains no image bytes")
        return Image.open(io.BytesIO(data))

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Fetch the shards of these images, in this order, in the background."""
        numbers = self.numbers[indices]
        _, first = np.unique(numbers, return_index=True)
        wanted = [int(numbers[place]) for place in np.sort(first) if self.shards[numbers[place]].is_copied]
        if wanted:
            self._of_process().expect(self.shards, wanted)

    def choose(self, indices: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Return at most so many positions in `indices`, evenly spaced in a few shards, for a first look."""
        known = np.unique(self.numbers[indices])
        few = known[np.unique(np.linspace(0, len(known) - 1, min(len(known), _LOOKED_AT)).astype(np.int64))]
        inside = np.flatnonzero(np.isin(self.numbers[indices], few))
        return inside[np.unique(np.linspace(0, len(inside) - 1, min(len(inside), most)).astype(np.int64))]

    def _of_process(self) -> _Own:
        if self._own is None or self._own.process != os.getpid():  # a forked worker shares no position in a file
            self._own = _Own()
        return self._own


class _Own:
    """Shards that one process has open, and the thread that fetches ahead for it."""

    def __init__(self) -> None:
        self.process, self.lock = os.getpid(), threading.Lock()
        self.files: dict[int, OpenShard] = {}
        self.expected: set[int] = set()
        self.queue: queue.SimpleQueue[Shard] | None = None

    def open(self, shards: Sequence[Shard], number: int, most: int) -> OpenShard:
        with self.lock:
            found = self.files.pop(number, None) or OpenShard(shards[number])
            self.files[number] = found  # the last ones are those used last
            while len(self.files) > most:
                del self.files[next(iter(self.files))]
        return found

    def expect(self, shards: Sequence[Shard], numbers: Sequence[int]) -> None:
        new = [number for number in numbers if number not in self.expected]
        self.expected = set(numbers)
        if new and self.queue is None:
            self.queue = queue.SimpleQueue()
            # A daemon: nobody waits at the end for what will not be read.
            threading.Thread(target=_fetch_each, args=(self.queue,), daemon=True).start()
        for number in new:
            assert self.queue is not None
            self.queue.put(shards[number])


def _fetch_each(wanted: queue.SimpleQueue[Shard]) -> None:
    while True:
        # Another worker is at it, or it fails: whoever reads it will wait, or say so.
        with suppress(VitclinicError):
            fetch(wanted.get(), patience=0)


class ShardedImages(StreamedImages):
    """Images that are read from shards, decoded whenever they are read."""

    records: ShardRecords

    def __init__(
        self, records: ShardRecords, size: Size, framed: Size, channels: int, config: DataConfig, progress: Progress
    ) -> None:
        super().__init__(records, size, framed, channels, config.on_error, progress)
        self.window = config.window
        self.span = -(-len(records) * self.window // len(records.shards))
        """Images of a window, on average."""

    def shards(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard of each image."""
        return self.records.numbers[self.kept[rows]]

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Fetch the shards of these images in the background."""
        self.records.expect(self.kept[rows])

    def choose(self, rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Return at most so many positions in `rows`, in a few shards."""
        return self.records.choose(self.kept[rows], most)

    def decode(self, record: int) -> Pixels:
        """Decode one image; that its shard is gone is not an error of the image."""
        self.records.open(record)
        return super().decode(record)


def shuffle_windows(numbers: NDArray[np.int64], window: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return an order of images: shards permuted, and the images of each `window` shards in a row shuffled together.

    Args:
        numbers: Shard of each image.
        window: Shards that are shuffled together.
        random: Source of random numbers.

    Example:
        >>> order = shuffle_windows(np.array([7, 7, 3, 3, 5, 5]), 1, np.random.default_rng(0))
        >>> [len(set(np.array([7, 7, 3, 3, 5, 5])[order[place : place + 2]])) for place in (0, 2, 4)]
        [1, 1, 1]
    """
    known, codes = np.unique(numbers, return_inverse=True)
    ranks = random.permutation(len(known))
    return np.lexsort((random.permutation(len(numbers)), ranks[codes] // window)).astype(np.int64)


class WindowOrder(SampleOrder):
    """Order of a training stream that reads shards, by `shuffle_windows` from (seed, epoch)."""

    def __init__(self, numbers: NDArray[np.int64], window: int, seed: int, repeats: int = 1) -> None:
        super().__init__(len(numbers), seed, repeats)
        self.numbers, self.window = numbers, window

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        return shuffle_windows(self.numbers, self.window, generator("shards", self.seed, epoch))


def make_order(split: Split, seed: int, repeats: int) -> SampleOrder:
    """Return the order in which a training stream shows the images of a split."""
    images = split.images
    if isinstance(images, ShardedImages):
        return WindowOrder(images.shards(split.rows), images.window, seed, repeats)
    return SampleOrder(len(split), seed, repeats)
