"""The decoded images of a data set: a small one from a cache that all runs share, a large one image by image.

A cache entry is a folder `VITCLINIC_CACHE/images/KEY` with `images.bin` (uint8 [n, height, width, channels], the shape
is in `entry.json`) and `kept.npy` (the records that it holds). It is published by one rename after it has reached the
disk, so a killed build leaves nothing half done. Opening one compares its content with its digest (0.1 s for CIFAR-10);
a damaged one is built again. When the entries together exceed `VITCLINIC_CACHE_SIZE`, the least recently used ones are
deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DamagedFileError, DataError
from vitclinic._core.io import (
    expand_path,
    find_path,
    fingerprint,
    is_unchanged,
    read_record,
    refuse_special,
    sign,
    sync,
)
from vitclinic.data.decoding import UNREADABLE, Pixels, Size, decode_and_fit, is_photo, pixels
from vitclinic.data.source import LEAVE_OUT, ComputedRecords, Records, describe_unreadable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how many are done, how many there are)."""

log = logging.getLogger(__name__)

_FORMAT = 2
_ENTRY = {"digest": str, "skipped": list, "shape": list}
_HOUR = 3600
_SHOWN = 80


def cache_folder() -> Path:
    """Return the cache folder: `VITCLINIC_CACHE`, or `vitclinic` in the user's cache folder."""
    own = os.environ.get("VITCLINIC_CACHE")
    text = os.environ.get("XDG_CACHE_HOME", "~/.cache") if own is None else own
    find_path(text, DataError, "the cache")
    folder = expand_path(text, DataError)
    return folder / "vitclinic" if own is None else folder


def cache_limit() -> int:
    """Return how many bytes the cache may hold: `VITCLINIC_CACHE_SIZE` (such as 5G), 20 GB by default."""
    text = os.environ.get("VITCLINIC_CACHE_SIZE", "20G").strip().upper().removesuffix("B")
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    try:
        size = int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise DataError(f"VITCLINIC_CACHE_SIZE is '{text[:_SHOWN]}'; set it to a size such as 5G.")
    return size


class CachedImages:
    """Pixels of a cache entry. Pickles as its path, so that workers map the file instead of copying it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        entry = read_record(folder / "entry.json", _ENTRY, "delete its folder")
        self.digest: str = entry["digest"]
        self.skipped: list[str] = entry["skipped"]
        for name in ("kept.npy", "images.bin"):
            refuse_special(folder / name)
        self.kept: NDArray[np.int64] = np.load(folder / "kept.npy")
        self.images: NDArray[np.uint8] = np.empty(entry["shape"], np.uint8)
        if self.images.size:  # an empty file cannot be mapped
            self.images = np.memmap(folder / "images.bin", np.uint8, "r", shape=tuple(entry["shape"]))

    def holds(self, labels: NDArray[np.int64]) -> bool:
        """Return True if the pixels, and the labels of the records kept, are those that were stored."""
        digest = hashlib.sha256(self.images.reshape(-1).data)
        digest.update(np.ascontiguousarray(labels[self.kept]).tobytes())
        return digest.hexdigest() == self.digest

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedImages, (self.folder,)

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return images [B, height, width, C]."""
        return np.asarray(self.images[indices])


def open_cached_images(
    records: Records, key: str, size: Size, channels: int, on_error: str, progress: Progress
) -> CachedImages:
    """Return the decoded images of `records` from the cache, decoding them first if they are not there yet."""
    folder = cache_folder() / "images" / key
    _make_parent(folder.parent)
    with cache_errors(folder.parent):
        images = _open_intact(folder, records.labels)
        if images is None:
            staging = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
            try:
                _decode_all(records, staging, size, channels, on_error, progress)
                _publish(staging, folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):  # an entry that cannot be looked at is not ours to remove
                _evict(folder.parent)
            images = CachedImages(folder)
    with suppress(OSError):  # a cache that others own can be read, too
        os.utime(folder)
    return images


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one sentence about the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot use the cache '{folder}' ({error}); set VITCLINIC_CACHE.") from error


def _open_intact(folder: Path, labels: NDArray[np.int64]) -> CachedImages | None:
    """Return a cache entry; None if there is none, or if it was damaged and is removed now."""
    if not folder.exists():
        return None
    try:
        images = CachedImages(folder)
        if images.holds(labels):
            return images
        reason = "its pixels have changed"
    except (DamagedFileError, OSError, ValueError, IndexError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split())
    log.warning("The cached images in '%s' are damaged (%s); they are decoded again.", folder, reason)
    retired = folder.with_name(f".building-{folder.name}-{os.getpid()}")
    try:
        folder.rename(retired)
    except FileNotFoundError:
        return None  # another process has seen it, too
    except OSError as error:
        raise DataError(f"The cache '{folder}' is damaged and cannot be replaced ({error}); delete it.") from error
    shutil.rmtree(retired, ignore_errors=True)
    return None


def cache_key(fingerprint: str, split: str, size: Size, channels: int, on_error: str) -> str:
    """Return the name of the cache entry for one split at one size."""
    text = json.dumps([_FORMAT, fingerprint, split, list(size), channels, on_error])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_atomically(path: Path, text: str) -> None:
    """Write a small file into the cache, completely or not at all."""
    _make_parent(path.parent)
    staging = path.with_name(f".building-{path.name}-{os.getpid()}")
    with cache_errors(path.parent):
        try:
            staging.write_text(text)
            sync(staging)
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)


def read_stored(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any] | None:
    """Read a small file of the cache; None if it is not there or damaged, and has to be made again."""
    with cache_errors(path.parent):
        if not path.exists():
            return None
    try:
        record = read_record(path, fields, "it is made again")
        if not is_unchanged(record):
            raise DamagedFileError(f"'{path}' was changed since it was written; it is made again.")
    except DamagedFileError as error:
        log.warning("%s", error)
        return None
    record.pop("digest", None)
    return record


def _make_parent(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Cannot create the cache folder '{folder}' ({error}); set VITCLINIC_CACHE.") from error


def _decode_all(records: Records, folder: Path, size: Size, channels: int, on_error: str, progress: Progress) -> None:
    kept: list[int] = []
    skipped: list[str] = []
    digest = hashlib.sha256()
    # Written like any file, not through a map: on a full disk that is an error, not a crash.
    with (folder / "images.bin").open("wb") as file:
        for index, result in enumerate(_decode_each(records, size, channels)):
            if isinstance(result, str):
                if on_error != "skip":
                    raise DataError(f"{result} Remove it, {LEAVE_OUT}.")
                skipped.append(result)
            else:
                data = np.ascontiguousarray(result).tobytes()
                file.write(data)
                digest.update(data)
                kept.append(index)
            progress("decoding", index + 1, len(records))
    digest.update(np.ascontiguousarray(records.labels[kept]).tobytes())
    np.save(folder / "kept.npy", np.asarray(kept, dtype=np.int64))
    entry = {"digest": digest.hexdigest(), "skipped": skipped, "shape": [len(kept), *size, channels]}
    (folder / "entry.json").write_text(json.dumps(entry))
    for file_written in folder.iterdir():
        sync(file_written)


def _decode_each(records: Records, size: Size, channels: int) -> Iterator[Pixels | str]:
    """Yield each image in order, or an error message if it is unreadable. Pillow decodes without the GIL."""

    def decode(index: int) -> Pixels | str:
        try:
            with records.read(index) as image:
                return decode_and_fit(image, channels, size)
        except (*UNREADABLE, DataError) as error:
            return describe_unreadable(records, index, error)

    if isinstance(records, ComputedRecords):  # nothing to decode: threads would only wait for each other
        for picture in records.pictures():
            fits = picture.shape == (*size, channels)
            yield picture if fits else decode_and_fit(Image.fromarray(picture), channels, size)
        return
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(records), 1024):  # in slices, so that decoded images do not pile up
            yield from pool.map(decode, range(start, min(start + 1024, len(records))))


def _publish(staging: Path, folder: Path) -> None:
    try:
        staging.rename(folder)
        sync(folder.parent)
    except OSError:
        if not (folder / "entry.json").exists():  # otherwise another process built the same entry first
            raise


def _evict(folder: Path) -> None:
    """Remove what was not used for longest until the rest fits, and what killed builds left.

    Nothing that was used within the hour goes: another split of the same set, or another process, may be about to
    open it.
    """
    now = time.time()
    for staging in folder.glob(".building-*"):
        if now - staging.stat().st_mtime > 24 * _HOUR:
            shutil.rmtree(staging, ignore_errors=True)
    entries = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    sizes = {p: sum(f.lstat().st_size for f in p.iterdir()) for p in entries}
    excess = sum(sizes.values()) - cache_limit()
    for entry in sorted(entries, key=lambda p: p.stat().st_mtime):
        if excess <= 0 or now - entry.stat().st_mtime < _HOUR:
            return
        shutil.rmtree(entry, ignore_errors=True)  # a process that maps it keeps its pages
        excess -= sizes[entry]


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
            raise DataError(f"{sentence} Remove it, {LEAVE_OUT}.") from None

    def _problems(self, progress: Progress) -> dict[int, str]:
        """Return an error message for each unreadable image, by its index."""
        stored = cache_folder() / "skipped" / f"{self.digest[:32]}.json"
        found = read_stored(stored, {})
        if found is None or not all(index.isdecimal() and isinstance(why, str) for index, why in found.items()):
            found = {str(index): why for index, why in self._check_images(progress) if why is not None}
            write_atomically(stored, json.dumps(sign(found)))
        return {int(index): why for index, why in found.items()}

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
