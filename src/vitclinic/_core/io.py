"""Atomic writes, and file errors as sentences."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RunError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than allowed",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ENOENT: "the folder cannot be created",
}


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn a failed write below `path` into one `RunError` sentence."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, str(error))
        raise RunError(
            f"Cannot write '{path}': {reason}. Files written so far are intact; free some space or choose another"
            " folder (out), then resume."
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by one rename, so that a reader sees the old or the new one, never a partial file."""
    staging = path.with_name(f".{path.name}.tmp")
    with write_errors(path):
        try:
            with staging.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_bytes` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Flush what was written to `path`, a file or a folder, to disk; Windows cannot open folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, target: Path, retired: Path) -> None:
    """Make the folder `staging` visible as `target` by one rename; the old `target` becomes `retired`.

    At every moment `target` or `retired` is there and whole.
    """
    if target.exists():  # else a publish was cut off here, and `retired` is all there is
        shutil.rmtree(retired, ignore_errors=True)
        target.rename(retired)
    staging.rename(target)
    sync(target.parent)
