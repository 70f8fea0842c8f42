"""Copies of shards, from which they are read.

A tar on this machine is read where it lies. Everything else is copied, once for all processes, to
`VITCLINIC_CACHE/shards`, and the copies that were not used for longest are deleted when they exceed
`VITCLINIC_CACHE_SIZE`. A copy ends with the SHA-256 of what is before it and appears by one rename; a damaged one is
made again. Of parquet the images are copied, one behind the other with a table of their places, so that each can be
read alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import DataError
from vitclinic._core.io import sync
from vitclinic._core.lock import FOREVER, hold_lock
from vitclinic.data.cache import cache_folder, cache_limit
from vitclinic.data.shards.names import Shard, fetch_errors, open_system

log = logging.getLogger(__name__)

_HOUR = 3600
_DIGEST_BYTES = hashlib.sha256().digest_size
_PAUSES = (1.0, 4.0)
"""Seconds between the attempts to fetch a shard."""
_ATTEMPTS = 3
"""To open a copy, before it is given up."""

T = TypeVar("T")


def copy_path(shard: Shard) -> Path:
    """Return where the copy of a shard is, or will be."""
    return cache_folder() / "shards" / f"{shard.key}{'.images' if shard.is_parquet else '.tar'}"


def fetch(shard: Shard, patience: float = FOREVER) -> Path:
    """Return the file to read a shard from, copying it first if that takes a copy.

    Args:
        shard: The shard.
        patience: Seconds to wait for another process that is copying it.

    Raises:
        DataError: It is gone, has changed, or cannot be copied.
        LockedError: Another process is copying it.
    """
    if not shard.is_copied:
        return Path(shard.url)
    copy = copy_path(shard)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            with hold_lock(copy.with_suffix(".lock"), f"'{copy}' is being made.", patience=patience):
                if not copy.exists():
                    _make_copy(shard, copy)
        with suppress(OSError):  # deleted to make room, or another user's
            os.utime(copy)
    except OSError as error:
        raise DataError(
            f"Cannot copy '{shard.url}' to the cache '{copy.parent}' ({error}); set VITCLINIC_CACHE."
        ) from error
    return copy


def _make_copy(shard: Shard, copy: Path) -> None:
    make_room(copy.parent, shard.size)
    mine = f"{copy.name}-{os.getpid()}-{threading.get_ident()}"
    raw, staging = (copy.with_name(f".building-{kind}-{mine}") for kind in ("raw", "copy"))
    try:
        if shard.is_remote:
            _try_again(lambda: _download(shard, raw))
        if shard.is_parquet:
            from vitclinic.data.parquet import copy_images

            with fetch_errors(shard.url):
                copy_images(raw if shard.is_remote else Path(shard.url), staging)
        else:
            raw.replace(staging)
        with staging.open("r+b") as file:
            file.write(_hash_start(file, staging.stat().st_size))
        sync(staging)
        staging.replace(copy)
        make_room(copy.parent, 0)  # others may have been copied meanwhile
    finally:
        raw.unlink(missing_ok=True)
        staging.unlink(missing_ok=True)


def _download(shard: Shard, target: Path) -> None:
    with fetch_errors(shard.url):
        system, path = open_system(shard.url)
        system.get_file(path, str(target))
    found = target.stat().st_size
    if shard.size and found != shard.size:
        raise DataError(
            f"'{shard.url}' has {found:,} bytes, and had {shard.size:,} when the data was opened: start again."
        )


def _try_again(work: Callable[[], T]) -> T:
    """Do what a network may interrupt, up to three times; what is not there is not asked for again."""
    for pause in _PAUSES:
        try:
            return work()
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError | ImportError):
                raise
            log.warning("%s Trying again in %g s.", error, pause)
            time.sleep(pause)
    return work()


def _hash_start(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the next `size` bytes of a file, which is then behind them."""
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(2**20, size))):
        digest.update(block)
        size -= len(block)
    return digest.digest()


def make_room(folder: Path, needed: int) -> None:
    """Delete the copies that were not used for longest until `needed` bytes more fit, and what killed copies left.

    Whoever has one open keeps it: it is only its name that goes.
    """
    now, copies = time.time(), list[tuple[float, int, Path]]()
    for path in folder.iterdir():
        with suppress(OSError):  # another process has deleted it, or still reads it (Windows)
            status = path.stat()
            if path.name.startswith(".building-") and now - status.st_mtime > _HOUR:
                path.unlink()
            elif path.suffix in (".tar", ".images"):
                copies.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in copies) + needed - cache_limit()
    for _, size, path in sorted(copies):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink()
        excess -= size


class OpenShard:
    """A shard that is open for reading, by one process.

    Raises:
        DataError: It is gone, has changed, or cannot be copied.
    """

    def __init__(self, shard: Shard) -> None:
        self.file = self._open(shard)
        self.places: NDArray[np.int64] | None = None
        if shard.is_parquet:
            count = int.from_bytes(self.file.read(8), "little")
            self.places = np.frombuffer(self.file.read(8 * (count + 1)), np.int64)

    @staticmethod
    def _open(shard: Shard) -> BinaryIO:
        for _ in range(_ATTEMPTS):
            with fetch_errors(shard.url):
                path = fetch(shard)
                try:
                    file = path.open("rb")
                except FileNotFoundError:
                    if shard.is_copied:  # deleted at once, to make room for another
                        continue
                    raise
            if not shard.is_copied:
                status = os.fstat(file.fileno())
                if (status.st_size, str(status.st_mtime_ns)) == (shard.size, shard.version):
                    return file
                file.close()
                raise DataError(f"'{shard.url}' has changed since the data was opened: start again.")
            if _is_whole(file):
                return file
            file.close()
            log.warning("The copy '%s' of '%s' is damaged and is made again.", copy_path(shard), shard.url)
            copy_path(shard).unlink(missing_ok=True)
        raise DataError(
            f"The copy '{copy_path(shard)}' is damaged or deleted as soon as it is made; check the disk, or set"
            " VITCLINIC_CACHE."
        )

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes of an image: at a place in a tar, or of a row of parquet."""
        if self.places is not None:
            start, length = int(self.places[start]), int(self.places[start + 1] - self.places[start])
        self.file.seek(start)
        return self.file.read(length)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def _is_whole(file: BinaryIO) -> bool:
    """Return True if a copy ends with the digest of what is before it; the file is then at its beginning."""
    digest = _hash_start(file, os.fstat(file.fileno()).st_size - _DIGEST_BYTES)
    whole = file.read() == digest
    file.seek(0)
    return whole
