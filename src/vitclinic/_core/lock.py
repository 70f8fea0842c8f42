"""Locks between processes, as files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitclinic._core.errors import LockedError
from vitclinic._core.io import write_errors

log = logging.getLogger(__name__)

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
