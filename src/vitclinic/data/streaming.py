"""Large sets: images decoded whenever they are looked at, one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import overload

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import DataError
from vitclinic._core.hashing import fingerprint
from vitclinic.data.cache import Progress, cache_folder, write_atomically
from vitclinic.data.decoding import UNREADABLE, Pixels, Size, fitted, is_photo, pixels
from vitclinic.data.source import Records, unreadable


class StreamedImages:
    """Images at their own size where they are photographs (crops come from the original), else fitted.

    With `on_error: skip` every image is decoded once beforehand to find the unreadable ones, which is remembered.
    """

    def __init__(
        self, records: Records, size: Size, framed: Size, channels: int, on_error: str, progress: Progress
    ) -> None:
        self.records, self.size, self.framed, self.channels = records, size, framed, channels
        self.digest = fingerprint("streamed", records.contents(), records.labels.tolist(), size, channels)
        problems = self._problems(progress) if on_error == "skip" else {}
        self.skipped = list(problems.values())
        self.kept: NDArray[np.int64] = np.setdiff1d(np.arange(len(records)), list(problems)).astype(np.int64)

    def read(self, indices: NDArray[np.int64]) -> OnDemand:
        return OnDemand(self, self.kept[indices])

    def decode(self, record: int) -> Pixels:
        try:
            with self.records.read(record) as image:
                if is_photo(self.size):
                    return pixels(image, self.channels)
                return fitted(image, self.channels, self.size)
        except (*UNREADABLE, DataError) as error:
            sentence = unreadable(self.records, record, error)
            raise DataError(f"{sentence} Remove it, or pass data.on_error=skip.") from None

    def _problems(self, progress: Progress) -> dict[int, str]:
        """The sentence about each unreadable image, by its index."""
        stored = cache_folder() / "skipped" / f"{self.digest[:32]}.json"
        if not stored.exists():
            found = {str(index): why for index, why in self._checked(progress) if why is not None}
            write_atomically(stored, json.dumps(found))
        return {int(index): why for index, why in json.loads(stored.read_text()).items()}

    def _checked(self, progress: Progress) -> Iterator[tuple[int, str | None]]:
        def check(index: int) -> str | None:
            try:
                with self.records.read(index) as image:
                    fitted(image, self.channels, (8, 8))
            except (*UNREADABLE, DataError) as error:
                return unreadable(self.records, index, error)
            return None

        count = len(self.records)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, count, 1024):
                for index, why in enumerate(pool.map(check, range(start, min(start + 1024, count))), start):
                    progress("checking", index + 1, count)
                    yield index, why


class OnDemand(Sequence[Pixels]):
    """Some of the images: each is decoded when it is looked at, and never kept."""

    def __init__(self, images: StreamedImages, rows: NDArray[np.int64]) -> None:
        self.images, self.rows = images, rows
        self.framed = images.framed

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Pixels: ...

    @overload
    def __getitem__(self, index: slice) -> OnDemand: ...

    def __getitem__(self, index: int | slice) -> Pixels | OnDemand:
        if isinstance(index, slice):
            return OnDemand(self.images, self.rows[index])
        return self.images.decode(int(self.rows[index]))
