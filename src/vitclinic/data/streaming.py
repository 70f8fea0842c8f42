"""Large data sets: images are decoded one at a time, whenever they are read."""

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
from vitclinic.data.decoding import UNREADABLE, Pixels, Size, decode_and_fit, is_photo, pixels
from vitclinic.data.source import Records, describe_unreadable


class StreamedImages:
    """Images of a large set: photographs at their original size, from which crops are taken, others fitted.

    With `on_error: skip` every image is decoded once in advance to find the unreadable ones; the result is stored.
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
        """Return the images at `indices`, decoded on demand."""
        return OnDemand(self, self.kept[indices])

    def decode(self, record: int) -> Pixels:
        """Decode one image."""
        try:
            with self.records.read(record) as image:
                if is_photo(self.size):
                    return pixels(image, self.channels)
                return decode_and_fit(image, self.channels, self.size)
        except (*UNREADABLE, DataError) as error:
            sentence = describe_unreadable(self.records, record, error)
            raise DataError(f"{sentence} Remove it, or pass data.on_error=skip.") from None

    def _problems(self, progress: Progress) -> dict[int, str]:
        """Return an error message for each unreadable image, by its index."""
        stored = cache_folder() / "skipped" / f"{self.digest[:32]}.json"
        if not stored.exists():
            found = {str(index): why for index, why in self._check_images(progress) if why is not None}
            write_atomically(stored, json.dumps(found))
        return {int(index): why for index, why in json.loads(stored.read_text()).items()}

    def _check_images(self, progress: Progress) -> Iterator[tuple[int, str | None]]:
        def check(index: int) -> str | None:
            try:
                with self.records.read(index) as image:
                    decode_and_fit(image, self.channels, (8, 8))
            except (*UNREADABLE, DataError) as error:
                return describe_unreadable(self.records, index, error)
            return None

        count = len(self.records)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, count, 1024):
                for index, why in enumerate(pool.map(check, range(start, min(start + 1024, count))), start):
                    progress("checking", index + 1, count)
                    yield index, why


class OnDemand(Sequence[Pixels]):
    """Sequence of images, each of which is decoded when it is accessed and never kept."""

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
