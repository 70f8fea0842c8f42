"""Files: atomic writes, errors as sentences, locks between processes, and plain data read from YAML and JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from vitclinic._core.errors import LockedError, RecipeError, RunError

log = logging.getLogger(__name__)

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


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Give a file to write to that replaces `path` by one rename at the end, unless an exception ends the writing."""
    staging = path.with_name(f".{path.name}.tmp")
    with write_errors(path):
        try:
            yield staging
            sync(staging)
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by one rename, so that a reader sees the old or the new one, never a partial file."""
    with staged(path) as staging:
        staging.write_bytes(content)


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


FOREVER = -1.0
"""Patience without a limit."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def hold_lock(path: Path, busy: str, *, patience: float = 0.1, reentrant: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, whose folder must exist, for this process.

    Forked children such as data workers do not hold the lock, and a killed process holds it no longer. On file systems
    that have no locks, work goes on without one.

    Args:
        path: The lock file. It is removed at the end, unless the lock is reentrant.
        busy: The sentence of the error if another process holds the lock.
        patience: Seconds to wait for the lock, or `FOREVER`.
        reentrant: Allow this thread to hold the lock more than once.

    Raises:
        LockedError: Another process holds the lock.
        RunError: The lock file cannot be written.
    """
    from filelock import FileLock, Timeout  # takes 0.2 s

    lock = FileLock(path.absolute(), timeout=patience, is_singleton=reentrant)
    with write_errors(path.parent):
        try:
            lock.acquire()
        except Timeout:
            raise LockedError(busy) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("'%s' cannot be locked (%s): make sure that no other process uses it.", path, error)
    try:
        yield
    finally:
        if not reentrant:
            with suppress(OSError):  # Windows keeps a file that is open
                path.unlink()
        lock.release()


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


def read_yaml(text: str) -> Any:
    """Parse YAML; raise a yaml.YAMLError if it is invalid or has a duplicate key."""
    return yaml.load(text, _Loader)


def parse_yaml(text: str, what: str) -> Any:
    """Parse a YAML text; `what` names it in error messages.

    Raises:
        RecipeError: The text is not valid YAML.
    """
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{what} is not YAML: {reason}") from error
    return _numbers(value)


def _numbers(value: Any) -> Any:
    """Convert strings such as `1e-3` to numbers: YAML 1.1 reads them as strings, nobody means that."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read_json(text: str) -> Any:
    """Parse JSON; raise a ValueError if it is invalid or has a duplicate key."""
    return json.loads(text, object_pairs_hook=_table)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key '{key}'")
        found[key] = value
    return found


def fingerprint(*parts: Any) -> str:
    """Return the SHA-256 of plain data, by way of its JSON: a short name for it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
