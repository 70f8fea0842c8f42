"""Tables of parquet files: read into memory, or memory-mapped from a copy in the cache if they are large.

The copy is in Arrow's own format, which is read row by row from disk. It is compared with a digest of all but its
images when it is opened, and made again if it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint, sign, sync
from vitclinic.data.cache import cache_errors, cache_folder, read_stored, write_atomically

log = logging.getLogger(__name__)

IN_MEMORY_BYTES = 2**30
"""Files of more than this together are read through a memory-mapped copy in the cache."""


def read_table(paths: list[Path]) -> pa.Table:
    """Return the rows of all files: in memory, or memory-mapped if they are large."""
    try:
        if sum(path.stat().st_size for path in paths) <= IN_MEMORY_BYTES:
            return pa.concat_tables([pq.read_table(path) for path in paths])
        return _map_as_arrow(paths)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{paths[0]}' cannot be read as parquet: {error}") from error


def _map_as_arrow(paths: list[Path]) -> pa.Table:
    """Copy the rows to Arrow's own format and map that: parquet is read in groups, Arrow row by row from disk."""
    folder = cache_folder() / "tables"
    copy = folder / f"{fingerprint(stamp_files(paths))[:32]}.arrow"
    with cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        table = _open_intact(copy)
        if table is None:
            _copy_as_arrow(paths, copy)
            table = _map(copy)
            write_atomically(copy.with_suffix(".json"), json.dumps(sign({"content": _hash_small_values(table)})))
    return table


def _copy_as_arrow(paths: list[Path], copy: Path) -> None:
    staging = copy.with_suffix(f".{os.getpid()}")
    try:
        with pa.OSFile(str(staging), "wb") as sink, pa.ipc.new_file(sink, pq.read_schema(paths[0])) as writer:
            for path in paths:
                for batch in pq.ParquetFile(path).iter_batches():
                    writer.write_batch(batch)
        sync(staging)
        staging.replace(copy)
    finally:
        staging.unlink(missing_ok=True)


def _map(copy: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(copy))).read_all()


def _open_intact(copy: Path) -> pa.Table | None:
    """Return a cached copy; None if there is none, or one that is damaged or that nothing vouches for."""
    stored = read_stored(copy.with_suffix(".json"), {"content": str})
    if stored is None or not copy.is_file():
        return None
    try:
        table = _map(copy)
        if _hash_small_values(table) == stored["content"]:
            return table
        reason = "its values have changed"
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
    log.warning("The cached copy '%s' is damaged (%s); it is made again.", copy, reason)
    return None


def _hash_small_values(table: pa.Table) -> str:
    """Return the SHA-256 of all but the bytes of images, which would take minutes: damaged ones do not decode."""
    digest = hashlib.sha256(table.schema.serialize())
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in _small_buffers(chunk):
                digest.update(buffer)
    return digest.hexdigest()


def _small_buffers(array: pa.Array) -> Iterator[pa.Buffer]:
    """Yield the buffers of an array, without the content of binary values: of those, only where each begins."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [array.field(number) for number in range(kind.num_fields)]
        own = array.buffers()[:1]
    else:
        parts = [array.dictionary] if pa.types.is_dictionary(kind) else []
        binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        own = array.buffers()[:2] if binary else array.buffers()
    yield from (buffer for buffer in own if buffer is not None)
    for part in parts:
        yield from _small_buffers(part)


def stamp_files(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return what changes when a file does: for each its path, size and time."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
