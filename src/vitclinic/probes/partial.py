"""The unfinished work of a probe that takes minutes, on disk, so that an exam that was killed goes on where it was."""

from __future__ import annotations

import io
import logging
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import RunError
from vitclinic._core.io import write_bytes, write_errors

log = logging.getLogger(__name__)

SAVED_EVERY = 1.0
"""Seconds of finished work that a killed exam may lose."""

_IDENTITY = "identity"


class Partial:
    """Arrays at `path`, or nowhere if that is None. Each write replaces the file by one rename.

    `identity` says what else than the path they belong to: arrays with another one are not read. Who stores the
    finished measurement removes the file. Of several processes the leading one reads, for all, and writes.
    """

    def __init__(self, path: Path | None, identity: str = "", distributed: Distributed = ALONE) -> None:
        self.path = path
        self.identity = identity
        self.distributed = distributed
        self._written = time.monotonic()

    def read(self) -> dict[str, NDArray[Any]] | None:
        """What an earlier attempt left, or None; a damaged file counts as none."""
        return self.distributed.leader_only(self._read)

    def _read(self) -> dict[str, NDArray[Any]] | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            log.warning("'%s' cannot be read, and is made anew: %s", self.path, error)
            return None
        return arrays if str(arrays.pop(_IDENTITY, "")) == self.identity else None

    def write(self, arrays: Mapping[str, NDArray[Any]], every: float = 0.0) -> None:
        """Keep the arrays, unless the last write is less than `every` seconds ago.

        That they cannot be written is no reason to lose the measurement, too: a warning.
        """
        if self.path is None or not self.distributed.is_leader or time.monotonic() - self._written < every:
            return
        buffer = io.BytesIO()
        named: dict[str, Any] = {_IDENTITY: np.array(self.identity), **arrays}
        np.savez(buffer, **named)
        try:
            with write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, buffer.getvalue())
        except RunError as error:
            log.warning("%s The measurement goes on, but could not be resumed.", error)
            self.path = None
        self._written = time.monotonic()
