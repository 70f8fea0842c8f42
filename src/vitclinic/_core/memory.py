"""Errors that mean out of memory, whichever library raises them."""

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


def format_bytes(size: float) -> str:
    """Format a number of bytes for people to read.

    Example:
        >>> [format_bytes(size) for size in (1480, 31_700_000, 2.34e9)]
        ['under 1 MB', '32 MB', '2.3 GB']
    """
    if size < 1e6:
        return "under 1 MB"
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def release_memory() -> None:
    """Return what torch holds in reserve to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
