"""Running out of memory: recognizing it, and retrying with half the batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from vitclinic._core.errors import ModelError
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

T = TypeVar("T")

_CPU_ALLOCATOR = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` means that the device, Python or the CPU allocator is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def halving(subject: Subject, what: str, attempt: Callable[[], T]) -> T:
    """Call `attempt`, and start over with half the `subject.batch_size` whenever memory runs out."""
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if subject.batch_size == 1:
                raise ModelError(f"out of memory even with one image at a time ({_first_line(error)}).") from error
            tried, subject.batch_size = subject.batch_size, subject.batch_size // 2
        # Outside of the handler, since the error holds on to the tensors of the failed attempt.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("%s: out of memory with a batch of %d images; retrying with %d.", what, tried, subject.batch_size)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
