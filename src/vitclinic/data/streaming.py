"""Large sets: images decoded whenever they are read."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.decoding import UNREADABLE, Pixels, Size, fitted, pixels
from vitclinic.data.framing import is_photo
from vitclinic.data.source import Records, fingerprint, unreadable
from vitclinic.errors import DataError

log = logging.getLogger(__name__)


class StreamedImages:
    """Images at their own size where they are photographs (crops come from the original), else fitted."""

    def __init__(self, records: Records, size: Size, channels: int, on_error: str) -> None:
        self.records, self.size, self.channels, self.on_error = records, size, channels, on_error
        self.kept: NDArray[np.int64] = np.arange(len(records), dtype=np.int64)
        self.skipped: list[str] = []
        names = [Path(records.name(i)).name for i in range(len(records))]
        self.digest = fingerprint("streamed", names, records.labels.tolist(), size, channels)

    def read(self, indices: NDArray[np.int64]) -> list[Pixels]:
        return [self._readable(int(index)) for index in indices]

    def _readable(self, index: int) -> Pixels:
        """Image `index`; with `on_error: skip` an unreadable one is replaced by the next of its class."""
        try:
            return self._decode(index)
        except (*UNREADABLE, DataError) as error:
            sentence = unreadable(self.records, index, error)
            if self.on_error != "skip":
                raise DataError(f"{sentence} Remove it, or pass data.on_error=skip.") from None
            log.warning("skipped %s", sentence)
        return self._stand_in(index)

    def _stand_in(self, index: int) -> Pixels:
        same_class = np.flatnonzero(self.records.labels == self.records.labels[index])
        for candidate in np.roll(same_class, -1 - int(np.searchsorted(same_class, index)))[:-1]:
            try:
                return self._decode(int(candidate))
            except (*UNREADABLE, DataError):
                continue
        raise DataError(f"{self.records.name(index)}: no image of its class can be read.")

    def _decode(self, index: int) -> Pixels:
        with self.records.read(index) as image:
            if is_photo(self.size):
                return pixels(image, self.channels)
            return fitted(image, self.channels, self.size)
