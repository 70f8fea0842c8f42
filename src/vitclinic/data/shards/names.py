"""Locations of shards: `shards/train-{000..099}.tar` is a hundred files, a folder is its tars or parquet files.

What has a `://` is reached through fsspec: http by itself, s3 and others by the user's own plugin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vitclinic._core.errors import DataError
from vitclinic._core.io import expand_path, find_path, fingerprint, refuse_special

SUFFIXES = (".tar", ".parquet")
MOST_SHARDS = 100_000

_COMPRESSED = re.compile(r"\.(tar\.\w+|tgz|zip|zst|gz)")
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")
_VERSIONS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "last_commit")
"""What fsspec's file systems call that by which a changed file is known."""


def expand_braces(text: str) -> list[str]:
    """Return the names that a pattern stands for, in order.

    Example:
        >>> expand_braces("train-{08..10}.tar")
        ['train-08.tar', 'train-09.tar', 'train-10.tar']
        >>> expand_braces("{train-{0..1},val}.tar")
        ['train-0.tar', 'train-1.tar', 'val.tar']

    Raises:
        DataError: A brace is not closed, holds neither a range nor a list, or there are too many names.
    """
    start = text.find("{")
    if start < 0:
        return [text]
    depth, last, parts = 0, start + 1, list[str]()
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0 or (depth == 1 and text[place] == ","):
            parts.append(text[last:place])
            last = place + 1
        if depth == 0:
            break
    else:
        raise DataError(f"'{text[:80]}' has a {{ without its }}; write train-{{000..099}}.tar.")
    inner = (
        _expand_range(parts[0], text) if len(parts) == 1 else [name for part in parts for name in expand_braces(part)]
    )
    tails = expand_braces(text[last:])
    if len(inner) * len(tails) > MOST_SHARDS:
        raise DataError(f"'{text[:80]}' stands for more than {MOST_SHARDS:,} files.")
    return [text[:start] + name + tail for name in inner for tail in tails]


def _expand_range(part: str, text: str) -> list[str]:
    found = _RANGE.fullmatch(part)
    if found is None or int(found[1]) > int(found[2]) or int(found[2]) - int(found[1]) >= MOST_SHARDS:
        raise DataError(
            f"'{text[:80]}': {{{part}}} is not a range of at most {MOST_SHARDS:,} numbers, such as {{000..099}}."
        )
    return [str(number).zfill(len(found[1])) for number in range(int(found[1]), int(found[2]) + 1)]


def is_pattern(spec: str) -> bool:
    """Return True if `data=` names files by a URL or by braces, and not something that is there under this name."""
    return "://" in spec or ("{" in spec and find_path(spec, DataError, "data") is None)


def is_sharded(spec: str) -> bool:
    """Return True if `data=` names shards: a pattern, a tar, or a folder of tars.

    A folder with other folders or tables in it is what these make it, whatever archive lies beside them.
    """
    if is_pattern(spec):
        return True
    path = expand_path(spec, DataError)
    if not path.is_dir():
        return path.suffix == ".tar"
    found = [file for file in path.iterdir() if not file.name.startswith(".")] if os.access(path, os.R_OK) else []
    suffixes = {file.suffix for file in found}
    return ".tar" in suffixes and suffixes.isdisjoint({".parquet", ".jsonl"}) and not any(map(Path.is_dir, found))


def list_shards(spec: str) -> list[str]:
    """Return the paths and URLs of all shards that `data=` names, in order; all are tars, or all are parquet.

    Raises:
        DataError: There are none, they are of different kinds, or a folder cannot be listed.
    """
    named = expand_braces(spec) if is_pattern(spec) else [spec]
    found = [shard for name in named for shard in ([name] if name.endswith(SUFFIXES) else _list_folder(name))]
    kinds = {Path(name).suffix for name in found}
    if len(kinds) > 1:
        raise DataError(f"'{spec}' has tars and parquet files; name those of one kind.")
    if doubled := [name for name in found if found.count(name) > 1] if len(set(found)) < len(found) else []:
        raise DataError(f"'{spec}' names '{doubled[0]}' twice.")
    return found


def _list_folder(name: str) -> list[str]:
    """Return the shards in a folder, here or elsewhere."""
    if _COMPRESSED.search(name[-8:]):
        raise DataError(f"'{name}' is compressed, so that no image in it can be read alone; unpack it to a plain .tar.")
    if "://" not in name:
        path = expand_path(name, DataError)
        paths = sorted(str(file) for file in path.iterdir()) if path.is_dir() else []
    else:
        with fetch_errors(name):
            system, folder = open_system(name)
            paths = sorted(system.unstrip_protocol(file) for file in system.ls(folder, detail=False))
    tars = [file for file in paths if file.endswith(".tar")]
    found = tars or [file for file in paths if file.endswith(".parquet")]
    if not found:
        raise DataError(f"There is no shard at '{name}'; expected a .tar or .parquet file, or a folder of them.")
    return found


def check_shards(spec: str) -> None:
    """Raise a DataError for a pattern that is wrong, or whose files on this machine are not there."""
    for name in expand_braces(spec):
        if "://" in name:
            with fetch_errors(name):
                open_system(name)
            return  # the others have the same protocol; whether they are there is not asked yet
        if find_path(name, DataError, "data") is None:
            raise DataError(f"There is no shard '{name}' (named by '{spec}').")


@contextmanager
def fetch_errors(name: str) -> Iterator[None]:
    """Turn whatever fsspec or its plugins raise into one sentence about a shard."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no shard at '{name}', or its server does not answer.") from error
    except ImportError as error:
        raise DataError(f"'{name}' needs a package that is not installed: {' '.join(str(error).split())}.") from error
    except Exception as error:  # a plugin has errors of its own
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(f"'{name}' cannot be read: {reason}.") from error


def open_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs  # comes with torch; takes 0.1 s

    found: tuple[Any, str] = url_to_fs(url)
    return found


@dataclass(frozen=True)
class Shard:
    """A file of many images, as it was when it was looked at."""

    url: str
    size: int
    version: str
    """Changes when the file does, as far as its server tells: modification time or ETag."""

    @property
    def key(self) -> str:
        """Name of what is stored about it."""
        return fingerprint(self.url, self.size, self.version)[:32]

    @property
    def is_remote(self) -> bool:
        return "://" in self.url

    @property
    def is_parquet(self) -> bool:
        return self.url.endswith(".parquet")

    @property
    def is_copied(self) -> bool:
        """True if it is read from a copy in the cache."""
        return self.is_remote or self.is_parquet


def look_at(url: str) -> Shard:
    """Return a shard with its size and version.

    Raises:
        DataError: It is gone, or cannot be reached.
    """
    with fetch_errors(url):
        if "://" not in url:
            path = expand_path(url, DataError)
            refuse_special(path)
            status = path.stat()
            return Shard(str(path.resolve()), status.st_size, str(status.st_mtime_ns))
        system, path_there = open_system(url)
        info = system.info(path_there)
        versions = (info.get(name) for name in _VERSIONS)
        return Shard(url, int(info.get("size") or 0), str(next(filter(None, versions), "")))


@contextmanager
def open_there(shard: Shard) -> Iterator[BinaryIO]:
    """Open a shard where it lies, to read parts of it."""
    with fetch_errors(shard.url):
        if not shard.is_remote:
            with Path(shard.url).open("rb") as file:
                yield file
        else:
            system, path = open_system(shard.url)
            with system.open(path, "rb") as file:
                yield file
