"""Running out of memory, whoever says so."""

from __future__ import annotations

import torch

_CPU_ALLOCATOR = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` means that the device, Python or the CPU allocator is out of memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def release_memory() -> None:
    """Return what torch holds in reserve to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
