"""Unfinished work of a slow probe on disk, so that an exam that was killed resumes where it stopped."""

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
"""Seconds of work that a killed exam may lose at most."""

_IDENTITY = "identity"


class Partial:
    """Arrays in a file that is replaced atomically.

    The code that stores the finished measurement removes the file. Of several processes, the leading one writes, and
    reads for all of them.

    Args:
        path: The file; None keeps nothing.
        identity: Text that identifies the work beyond the path; a file with another identity is ignored.
        distributed: Processes that measure together.
    """

    def __init__(self, path: Path | None, identity: str = "", distributed: Distributed = ALONE) -> None:
        self.path = path
        self.identity = identity
        self.distributed = distributed
        self._written = time.monotonic()

    def read(self) -> dict[str, NDArray[Any]] | None:
        """Return the arrays of an earlier attempt; None if there are none, or the file is damaged."""
        return self.distributed.leader_only(self._read)

    def _read(self) -> dict[str, NDArray[Any]] | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            log.warning("Cannot read '%s', starting over: %s", self.path, error)
            return None
        return arrays if str(arrays.pop(_IDENTITY, "")) == self.identity else None

    def write(self, arrays: Mapping[str, NDArray[Any]], every: float = 0.0) -> None:
        """Write the arrays, unless the last write was less than `every` seconds ago.

        If writing fails, log a warning and go on: the measurement itself must not be lost.
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
            log.warning("%s The measurement continues, but cannot be resumed if it is interrupted.", error)
            self.path = None
        self._written = time.monotonic()
